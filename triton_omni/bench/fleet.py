"""Client processes: one Python process can only read so much, and the server under test must be what limits."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self, cast

import uvloop

from triton_omni.bench.load import Share, Target, run
from triton_omni.bench.record import Record
from triton_omni.errors import StageError

MakeTarget = Callable[[], Target]
# From the moment that every process has its share to the first request.
HEAD_START_S = 0.1


class Fleet:
    """``processes`` clients, each with a target of its own from ``make_target`` (which crosses to them by pickle); a
    context manager. Connections stay open between levels.
    """

    def __init__(self, make_target: MakeTarget, processes: int) -> None:
        self._make_target = make_target
        self._context = multiprocessing.get_context("spawn")
        self._clients: list[tuple[Any, Connection]] = []
        self._count = processes

    def __enter__(self) -> Self:
        for _ in range(self._count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_client, args=(theirs, self._make_target), daemon=True)
            process.start()
            theirs.close()
            self._clients.append((process, ours))
        try:
            for _, connection in self._clients:
                self._receive(connection)
        except BaseException:
            self._stop(terminate=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop(terminate=error is not None)

    def _stop(self, *, terminate: bool) -> None:
        for process, connection in self._clients:
            connection.close()
            if terminate:
                process.terminate()
            process.join()

    def run(self, shares: Sequence[Share], done: Callable[[Record], None]) -> float:
        """One level; ``done`` is told each record as it comes. Returns the share of one core that the busiest process
        used. Raises: StageError when a client process ends.
        """
        open_connections = {connection: share for (_, connection), share in zip(self._clients, shares, strict=False)}
        start_s = time.monotonic() + HEAD_START_S
        for connection, share in open_connections.items():
            connection.send((share, start_s))
        busiest = 0.0
        while open_connections:
            for connection in cast(list[Connection], wait(list(open_connections))):
                told = self._receive(connection)
                if isinstance(told, Record):
                    done(told)
                else:
                    busiest = max(busiest, told)
                    del open_connections[connection]
        return busiest

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except EOFError:
            raise StageError("client", "a process of the load client ended; its message is above") from None


def _client(connection: Connection, make_target: MakeTarget) -> None:
    # Any of these: the parent has what it wanted, or has gone.
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        uvloop.run(_serve(connection, make_target()))


async def _serve(connection: Connection, target: Target) -> None:
    connection.send("ready")
    try:
        while True:
            share, start_s = await asyncio.to_thread(connection.recv)
            cpu_s, began_s = time.process_time(), time.monotonic()
            await run(share, target, start_s, connection.send)
            connection.send((time.process_time() - cpu_s) / (time.monotonic() - began_s))
    finally:
        await target.close()
