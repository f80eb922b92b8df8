"""The server under test: one tritonserver whose models are loaded anew one by one, and the frontend before it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from triton_omni.errors import ConfigError
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.repository import read_config, render, set_replicas, write_config
from triton_omni.serve.tritonserver import TritonServer, free_ports
from triton_omni.sweep.rows import ModelSettings

logger = logging.getLogger(__name__)
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
UNLOAD_TIMEOUT_S = 120.0
CRASH_S = 2.0  # a request that a crash cuts off comes back a moment before the process is gone
FRONTEND_TIMEOUT_S = 300.0


class Stack:
    """A tritonserver, started with the first settings, and with ``frontend_workers`` the frontend before it. A context
    manager; ``url`` is where clients go; ``directory`` gets the rendered repository and the logs.
    """

    def __init__(self, checkpoint: Path, directory: Path, frontend_workers: int) -> None:
        self._repository = render(REPOSITORY, directory / "repository")
        self.server = TritonServer(self._repository, checkpoint=checkpoint, log_path=directory / "tritonserver.log")
        self.url = self.server.grpc_target
        self._frontend: FrontendProcess | None = None
        if frontend_workers:
            [port] = free_ports(1)
            self.url = f"http://127.0.0.1:{port}"
            arguments = ["--host", "127.0.0.1", "--port", str(port), "--triton-url", self.server.grpc_target]
            arguments += ["--checkpoint", str(checkpoint), "--workers", str(frontend_workers), "--drain-s", "1"]
            self._frontend = FrontendProcess(self.url, arguments, log_path=directory / "frontend.log", drain_s=1)
        self._loaded: dict[str, ModelSettings] = {}

    def __enter__(self) -> Self:
        if self._frontend is not None:
            self._frontend.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._frontend is not None:
            self._frontend.__exit__(kind, error, traceback)
        self.server.stop()

    def changed(self, settings: Mapping[str, ModelSettings]) -> list[str]:
        """The models that ``apply`` would load."""
        return [model for model, wanted in settings.items() if self._loaded.get(model) != wanted]

    def apply(self, settings: Mapping[str, ModelSettings], timeout_s: float) -> None:
        """Load what differs from what is loaded; the rest goes on running. A model is taken out before it comes back:
        there is no room for two of it. Raises ConfigError with the log's errors, also when the start takes longer than
        ``timeout_s``.
        """
        models = self.changed(settings)
        logger.info("loading %s", ", ".join(models))
        began_s = time.monotonic()
        try:
            self._bring(models, settings, timeout_s)
        except ConfigError:
            # It may, as while it starts, which TritonServer itself makes up for.
            if not self.server.has_crashed(CRASH_S):
                raise
            logger.warning("tritonserver crashed while it loaded: starting it again")
            self._bring(list(settings), settings, timeout_s)
        self._loaded |= {model: settings[model] for model in models}
        logger.info("loaded in %.1f s", time.monotonic() - began_s)
        if self._frontend is not None:
            self._frontend.wait_ready(FRONTEND_TIMEOUT_S)

    def _bring(self, models: list[str], settings: Mapping[str, ModelSettings], timeout_s: float) -> None:
        with ThreadPoolExecutor(max(len(models), 1)) as threads:
            if self.server.running:
                list(threads.map(lambda model: self.server.unload(model, UNLOAD_TIMEOUT_S), models))
            for model in models:
                self._write(model, settings[model])
            if self.server.running:
                list(threads.map(self._load, models))
            else:
                self.server.stop()  # what is left of it
                self.server.start()
                self.server.wait_ready(timeout_s)

    def _write(self, model: str, wanted: ModelSettings) -> None:
        config = read_config(REPOSITORY / model)
        for key, value in wanted.layout.parameters.items():
            config.parameters[key].string_value = value
        if wanted.layout.replicas is not None:
            set_replicas(config, wanted.layout.replicas)
        if wanted.max_batch is not None:
            config.max_batch_size = wanted.max_batch
        write_config(self._repository / model, config)

    def _load(self, model: str) -> None:
        try:
            self.server.load(model)
        except ConfigError as error:
            lines = "\n".join(self.server.error_lines())
            raise ConfigError(f"{error.message}; log: {self.server.log_path}\n{lines}", field=error.field) from None
