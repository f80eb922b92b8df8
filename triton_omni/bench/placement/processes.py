"""One process for each engine, as the server has them, and the few words that they exchange with the parent."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from triton_omni.bench.placement.loads import Limit, Load, Pace, Settings, Times
from triton_omni.errors import StageError

SPAWN = multiprocessing.get_context("spawn")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    message: str


def new_pace() -> Pace:
    return Pace(SPAWN.Semaphore(0), SPAWN.Event())


class Worker:
    """The process of one engine ("talker" or "code2wav"), which begins to build it at once.

    Waiting raises StageError when the process has failed, and TimeoutError when it does not answer before ``limit``.
    """

    def __init__(self, side: str, settings: Settings, pace: Pace, environment: Mapping[str, str]) -> None:
        self.side = side
        self._pace = pace  # a semaphore is gone when the process that made it has forgotten it
        self._connection, theirs = SPAWN.Pipe()
        given = (theirs, side, settings, pace, dict(environment))
        self._process = SPAWN.Process(target=_serve, args=given, name=side, daemon=True)
        self._process.start()
        theirs.close()

    def finish(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def close(self, *, wait_s: float) -> None:
        """End it, by force when it has not ended within ``wait_s``."""
        self._process.join(wait_s)
        self._process.kill()
        self._process.join()
        self._connection.close()

    def built(self, limit: Limit) -> str:
        """Wait until the engine is there; what it runs on."""
        return str(self._receive(limit))

    def prepare(self, load: Load) -> None:
        """Let it open the sessions of ``load``."""
        self._connection.send(load)

    def ready(self, limit: Limit) -> None:
        """Wait until they are open."""
        self._receive(limit)

    def go(self) -> None:
        """Let the load that is prepared run."""
        self._connection.send("go")

    def times(self, limit: Limit) -> Times:
        times: Times = self._receive(limit)
        return times

    def _receive(self, limit: Limit) -> Any:
        if not self._connection.poll(limit.left_s):
            raise TimeoutError(f"the time is up, and the {self.side} was not ready")
        try:
            told = self._connection.recv()
        except EOFError:
            raise StageError(self.side, "its process ended; its message is above") from None
        if isinstance(told, _Failure):
            raise StageError(self.side, told.message)
        return told


def _serve(connection: Connection, side: str, settings: Settings, pace: Pace, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # in front of CUDA, which reads it once
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)7.0f ms  {side}: %(message)s")
    # Any of these: the parent has what it wanted, or has gone.
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        try:
            _work(connection, side, settings, pace)
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            logger.exception("%s failed", side)
            connection.send(_Failure(f"{type(error).__name__}: {error}"))


def _work(connection: Connection, side: str, settings: Settings, pace: Pace) -> None:
    from triton_omni.bench.placement.engines import SIDES, device_name  # late: it loads torch

    engine = SIDES[side](settings, pace)
    try:
        connection.send(device_name(settings.device))
        while (load := connection.recv()) is not None:
            engine.prepare(load)
            connection.send("ready")
            connection.recv()
            connection.send(engine.run(load))
    finally:
        engine.close()
