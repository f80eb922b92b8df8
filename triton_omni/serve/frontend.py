"""Starts the OpenAI frontend as a process of its own, waits until it answers, and stops it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from triton_omni.errors import ConfigError
from triton_omni.serve.processes import WITH_PARENT

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
# Beyond the drain: time to cut off what is left, and to clean up.
CLEAN_UP_S = 5
TABLE_EDGES = ("+--", "| ")  # tritonserver prints its models and options as wide tables


class FrontendProcess:
    """``python -m openai_frontend.main`` with ``arguments``; ``url`` is where it will answer. A context manager."""

    def __init__(self, url: str, arguments: Sequence[str], *, log_path: Path, drain_s: float) -> None:
        self.url = url
        self.log_path = log_path
        self._arguments = tuple(arguments)
        self._drain_s = drain_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ConfigError("the frontend was not started")
        return self._process

    def __enter__(self) -> Self:
        command = [*WITH_PARENT, sys.executable, "-m", "openai_frontend.main", *self._arguments]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            # A session of its own: Ctrl-C reaches the supervisor alone, which stops its children in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def wait_ready(self, timeout_s: float) -> None:
        """Return when it answers and its models are ready. Raises ConfigError with its log when it ends or is late."""
        process = self._running()
        deadline = time.monotonic() + timeout_s
        while not _answers(f"{self.url}/health/ready"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            if process.returncode is not None:
                raise ConfigError(f"the frontend ended with code {process.returncode}\n{tail(self.log_path)}")
            if time.monotonic() > deadline:
                raise ConfigError(f"the frontend was not ready after {timeout_s:g} s\n{tail(self.log_path)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ask it to end; open requests get ``drain_s`` to finish, then it is killed."""
        process = self._running()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(self._drain_s + CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            logger.warning("the frontend did not end within %g s: killed", self._drain_s + CLEAN_UP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last ``lines`` of a log under a line that names it."""
    written = path.read_text(errors="replace").splitlines() if path.exists() else []
    telling = [line for line in written if line.strip() and not line.startswith(TABLE_EDGES)]
    return "\n".join([f"--- last lines of {path}", *(telling[-lines:] or ["(empty)"])])


def _answers(url: str) -> bool:
    # Only the answer counts here, not whose name the certificate has.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
