"""CUDA's Multi-Process Service for a while: processes that find its daemon share one context of a GPU, so that their
kernels run side by side where they would take turns otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from triton_omni.errors import StageError

PROGRAM = "nvidia-cuda-mps-control"
_ANSWER_S = 15

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Daemon:
    """``environment``: what makes a process its client, set before the process first asks for CUDA."""

    environment: Mapping[str, str]

    def ask(self, command: str) -> str:
        """Raises: StageError when the daemon does not answer."""
        try:
            done = subprocess.run(
                [PROGRAM],
                input=command + "\n",
                env=os.environ | self.environment,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise StageError("mps", f"{PROGRAM} did not answer {command!r}: {error}") from None
        return done.stdout

    def check_clients(self) -> None:
        """Raises: StageError when no process works through it, because CUDA goes on without MPS where it cannot."""
        if not self.ask("get_server_list").split():
            raise StageError("mps", "the daemon runs, but it has no server: CUDA works without it")


@contextlib.contextmanager
def daemon() -> Iterator[Daemon]:
    """A daemon with directories of its own, ended afterwards. Raises: StageError where there is none to start."""
    if shutil.which(PROGRAM) is None:
        raise StageError("mps", f"{PROGRAM} is not installed")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        pipes, logs = Path(folder, "pipe"), Path(folder, "log")
        pipes.mkdir()
        logs.mkdir()
        started = Daemon({"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)})
        _start(started, logs / "start")
        try:
            yield started
        finally:
            try:
                started.ask("quit -t 5")
            except StageError as error:
                logger.warning("%s; it may still run, with its pipes in %s", error, pipes)


def _start(started: Daemon, said: Path) -> None:
    # All GPUs: its clients' CUDA_VISIBLE_DEVICES counts within what the daemon sees.
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    # Into a file: the daemon keeps its output open, and a pipe would never end.
    with said.open("wb") as output:
        try:
            code = subprocess.run(
                [PROGRAM, "-d"],
                env={**environment, **started.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_ANSWER_S,
                check=False,
            ).returncode
        except (subprocess.SubprocessError, OSError) as error:
            raise StageError("mps", f"{PROGRAM} -d did not start: {error}") from None
    if code != 0:
        raise StageError("mps", f"{PROGRAM} -d ended with {code}: {said.read_text(errors='replace').strip()}")
