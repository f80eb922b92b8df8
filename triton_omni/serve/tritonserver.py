"""Starts a tritonserver over a model repository, waits until it is ready, and stops it without leaving anything.

The server is the ``tritonserver`` on PATH (NVIDIA's container), else the one that the package nvidia-pytriton carries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from triton_omni.errors import ConfigError
from triton_omni.model_config import CHECKPOINT_VARIABLE
from triton_omni.serve import reaper, server_log
from triton_omni.serve.installation import Installation, Interpreter
from triton_omni.serve.model_control import ModelControl
from triton_omni.serve.processes import WITH_PARENT, LoadingStubs, free_ports, host_for_clients

__all__ = ["BACKEND_CONFIG", "Installation", "Progress", "TritonServer", "free_ports"]

logger = logging.getLogger(__name__)

BACKEND_CONFIG: Mapping[str, int] = {
    "thread-pool-size": 256,  # serves every send() and every BLS call that waits for its first response
    "shm-default-byte-size": 4 << 20,
    "shm-growth-byte-size": 4 << 20,  # growing is slow: a few large steps instead of many of 1 MiB
    "stub-timeout-seconds": 600,  # a loaded machine starts its stubs slowly
}
EXIT_TIMEOUT_S = 5  # a client's open gRPC stream or an open sequence keeps the server for so long
MAX_STARTS = 3
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)

Progress = Callable[[str, str], None]
"""Called with a model's name and "loading" or "loaded"."""


class TritonServer:
    """One tritonserver process. A port that is None becomes a free one; use it as a context manager, or start/stop.

    ``backend_config`` overrides single entries of BACKEND_CONFIG; ``arguments`` are passed on to tritonserver as they
    are; ``environment`` is added to this process's own; ``python`` runs the models (this process's unless given). The
    log is rewritten at every start.
    """

    def __init__(
        self,
        model_repository: Path,
        *,
        checkpoint: Path | None = None,
        address: str = "127.0.0.1",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        log_path: Path,
        backend_config: Mapping[str, int] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        self.model_repository = model_repository
        self.checkpoint = checkpoint
        self.address = address
        free = iter(free_ports(3))
        self.http_port, self.grpc_port, self.metrics_port = (
            port if port is not None else next(free) for port in (http_port, grpc_port, metrics_port)
        )
        self.log_path = log_path
        self._backend_config = {**BACKEND_CONFIG, **(backend_config or {})}
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._python = python or Path(sys.executable)
        self._control = ModelControl()
        self.shm_prefix = f"triton_omni_{uuid.uuid4().hex[:12]}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        return f"http://{host_for_clients(self.address)}:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"{host_for_clients(self.address)}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{host_for_clients(self.address)}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """The process's id. Raises ConfigError when it was not started."""
        if self._process is None:
            raise ConfigError("this tritonserver was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; models load in the background. Raises ConfigError without a server or a checkpoint."""
        if self.running:
            raise ConfigError("this tritonserver runs already")
        if self.checkpoint is not None and not (self.checkpoint / "config.json").exists():
            raise ConfigError(f"{self.checkpoint} holds no config.json: not a checkpoint", field="checkpoint")
        installation, python = Installation.find(), Interpreter.of(self._python)
        scratch = Path(tempfile.mkdtemp(prefix="triton_omni_"))
        command = [*WITH_PARENT, str(installation.binary), *self._server_arguments()]
        command += installation.backend_directory(scratch / "backends", python)
        base = {**os.environ, "TMPDIR": str(scratch), **self._environment}  # what a killed model leaves goes, too
        env = installation.environment(base, python)
        if self.checkpoint is not None:
            env[CHECKPOINT_VARIABLE] = str(self.checkpoint.resolve())
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            # A session of its own: Ctrl-C reaches the launcher alone, and a hung server can be killed with its stubs.
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(self._process.pid), self.shm_prefix, str(scratch)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        logger.info("tritonserver %d: %s", self._process.pid, installation.binary)

    def _server_arguments(self) -> list[str]:
        backend = {**self._backend_config, "shm-region-prefix-name": self.shm_prefix}
        return [
            f"--model-repository={self.model_repository.resolve()}",
            *(f"--{kind}-address={self.address}" for kind in ("http", "grpc", "metrics")),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            *self._control.server_arguments(),
            *(f"--backend-config=python,{key}={value}" for key, value in backend.items()),
            *self._arguments,
        ]

    def wait_ready(self, timeout_s: float, progress: Progress | None = None) -> None:
        """Return when every model is ready. On failure the server is stopped and ConfigError carries the log's errors.

        A model's process that gets no time for a second while it loads (a busy machine, a virtual one that stands
        still) is lost to tritonserver (24.10), which then aborts over a lock of theirs, says that the process is not
        healthy, or waits for ever. That says nothing about the model: it is started up to MAX_STARTS times. The log
        of a start before the last is kept beside the log.

        Raises: ConfigError when a model does not load, the process ends, or ``timeout_s`` passes.
        """
        deadline_s = time.monotonic() + timeout_s
        seen: set[tuple[str, str]] = set()
        for starts in range(1, MAX_STARTS + 1):
            mishap = self._wait_ready_or_mishap(deadline_s, timeout_s, progress, seen)
            if mishap is None:
                return
            if starts == MAX_STARTS:
                self._fail(mishap)
            self._start_again(mishap)

    def _wait_ready_or_mishap(
        self, deadline_s: float, timeout_s: float, progress: Progress | None, seen: set[tuple[str, str]]
    ) -> str | None:
        """None once it is ready; what happened, if that may go well another time."""
        stubs = LoadingStubs(self.pid)
        while True:
            ended = self._wait_exit(0.1)
            log = self.log_path.read_text(errors="replace")
            failed = self._report(log, progress, seen)
            ending = f"tritonserver ended with code {self._returncode}"
            if failed and (unhealthy := server_log.unhealthy(log)):
                return unhealthy
            if not failed and self.has_crashed():
                return ending
            if ended or failed:
                self._fail(f"the model {failed!r} did not load" if failed else ending)
            if _answers(f"{self.http_url}/v2/health/ready"):
                self._report(self.log_path.read_text(errors="replace"), progress, seen)
                return None
            if lost := stubs.lost():
                self._fail(f"{lost} ended while it was loading")
            if forgotten := stubs.forgotten(server_log.initialized(log), server_log.loaded(log)):
                return f"tritonserver waits for {forgotten}, which has loaded"
            if time.monotonic() > deadline_s:
                self._fail(f"tritonserver was not ready after {timeout_s:g} s")

    def has_crashed(self, wait_s: float = 0.0) -> bool:
        """Whether it has ended, or does within ``wait_s``, by a crash's signal; not once it is stopped."""
        return self._process is not None and self._wait_exit(wait_s) and self._returncode in _CRASHES

    def load(self, model: str, timeout_s: float | None = None) -> None:
        """ModelControl.load."""
        self._control.load(self.http_url, model, timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        """ModelControl.unload."""
        self._control.unload(self.http_url, model, timeout_s)

    @property
    def _returncode(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    def _start_again(self, mishap: str) -> None:
        kept = self.log_path.with_suffix(".crashed" + self.log_path.suffix)
        logger.warning("%s (log: %s): starting it again", mishap, kept)
        self.stop()
        self.log_path.replace(kept)
        self.start()

    def _wait_exit(self, timeout_s: float) -> bool:
        if self._process is None:
            raise ConfigError("this tritonserver was not started")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def _report(self, log: str, progress: Progress | None, seen: set[tuple[str, str]]) -> str | None:
        """Tell ``progress`` what is new in the log; the name of a model that failed to load, else None."""
        for event in server_log.steps(log):
            if event not in seen and progress is not None:
                progress(*event)
            seen.add(event)
        return server_log.failed_model(log)

    def _fail(self, reason: str) -> None:
        self.stop(timeout_s=5)
        raise ConfigError("\n".join([f"{reason}; log: {self.log_path}", *self.error_lines()]))

    def error_lines(self) -> list[str]:
        """The log's last error lines with the tracebacks that follow them."""
        return server_log.error_lines(self.log_path.read_text(errors="replace"))

    def stop(self, timeout_s: float = EXIT_TIMEOUT_S + 3) -> None:
        """End the server: SIGINT, after ``timeout_s`` SIGKILL. Then its stubs, shared memory and files are gone."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("tritonserver %d did not stop within %g s: killed", process.pid, timeout_s)
                process.kill()
            process.wait()
        if self._reaper is not None:
            self._reaper.wait()
            self._reaper = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
