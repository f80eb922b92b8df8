"""Calls of one server, over a connection that is made when it is needed and again when it was lost."""

from __future__ import annotations

import asyncio
from collections import deque
from urllib.parse import urlsplit

from grpc import StatusCode

from openai_frontend.rpc.call import Call, RpcError
from openai_frontend.rpc.connection import Connection
from triton_omni.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0


class Channel:
    """``target``: HOST:PORT; nothing need answer there yet. Used on one event loop. Raises: ConfigError."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(f"//{target}")
        try:
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as the look-up will
        except ValueError:  # UnicodeError is one
            host = port = None
        if not host or not port or parts.netloc != target:
            raise ConfigError(f"must be HOST:PORT, got {target!r}", field="triton_url")
        self._target = target
        self._address = (host, port)
        self._calls: set[Call] = set()
        self._waiting: deque[Call] = deque()
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None

    def call(self, method: str, message: bytes, *, stall_timeout_s: float) -> Call:
        """The call, which is sent as soon as there is a connection; where none can be made it ends with UNAVAILABLE."""
        call = Call(method, message, stall_timeout_s, self._ended)
        self._calls.add(call)
        self._waiting.append(call)
        self._start_waiting()
        return call

    def _start_waiting(self) -> None:
        connection = self._connection
        while self._waiting and connection is not None and connection.has_room:
            call = self._waiting.popleft()
            if not call.ended.is_set():
                connection.start(call)
        if self._waiting and self._connecting is None and (connection is None or not connection.is_usable):
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, self._connection = await loop.create_connection(lambda: Connection(self._target), *self._address)
        except (OSError, TimeoutError) as error:
            failed, self._waiting = self._waiting, deque()
            for call in failed:
                call.end(RpcError(StatusCode.UNAVAILABLE, f"no connection to {self._target}: {error}"))
        self._connecting = None
        self._start_waiting()

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        self._start_waiting()

    async def close(self) -> None:
        """End what somebody still waits for, and return when the server has ended what was left."""
        for call in list(self._calls):
            if not call.is_left:
                call.cancel()
        await asyncio.gather(*(call.ended.wait() for call in list(self._calls)))
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()
