"""One call of a gRPC method: a message goes, messages come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import unquote

from grpc import StatusCode

from openai_frontend.rpc.frames import ProtocolError

# What a server may send of one call before it must wait for us.
WINDOW_BYTES = 2**20
# Messages that wait for a slow consumer before the server is kept waiting, too.
WAITING_MESSAGES = 64
_PREFIX_BYTES = 5  # of a message: whether it is compressed, and its length
_CODES = {code.value[0]: code for code in StatusCode}


class RpcError(Exception):
    """A call that failed: by its server, or because of the connection."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Carrier(Protocol):
    """The connection of a call that is under way."""

    def grant(self, stream_id: int, size: int) -> None: ...
    def reset(self, stream_id: int) -> None: ...


class Call:
    """``method``: /package.Service/Method; ``message``: what it gets. ``stall_timeout_s``: longest wait for a message.
    ``on_end`` is called once. A consumer may leave a wait at any time; the call goes on.
    """

    def __init__(self, method: str, message: bytes, stall_timeout_s: float, on_end: Callable[[Call], None]) -> None:
        self.method = method
        self._request = b"\0" + len(message).to_bytes(4, "big") + message
        self.ended = asyncio.Event()
        self.is_left = False
        self._stall_timeout_s = stall_timeout_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._carried: tuple[Carrier, int] | None = None  # by which connection, as which of its streams
        self._messages: deque[bytes] = deque()
        self._begun: list[bytes] = []  # parts of a message that is not whole yet
        self._begun_bytes, self._whole_bytes = 0, _PREFIX_BYTES
        self._ungranted_bytes = 0
        self._error: RpcError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def next(self) -> bytes | None:
        """A message; None after the last. Raises: RpcError, and TimeoutError when nothing comes for so long."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.ended.is_set():
                return None
            await self._wait()
        message = self._messages.popleft()
        self._grant()
        return message

    async def _wait(self) -> None:
        self._waiter, self._waiting_since_s = self._loop.create_future(), self._loop.time()
        if self._timer is None:
            self._watch()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _watch(self) -> None:
        """One timer for all waits: one for each would cost more than what is waited for."""
        due_s = (self._waiting_since_s if self._waiter else self._loop.time()) + self._stall_timeout_s
        if self._waiter is not None and due_s <= self._loop.time():
            self._timer = None
            if not self._waiter.done():
                self._waiter.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_at(due_s, self._watch)

    def leave(self, within_s: float) -> None:
        """Nobody waits for the rest any more; a server that has not ended the call ``within_s`` is told to."""
        self.is_left = True
        self._messages.clear()
        self._grant()
        self._stop_timer()
        if not self.ended.is_set():
            self._timer = self._loop.call_later(within_s, self.cancel)

    def cancel(self) -> None:
        """Tell the server to end the call, if it has not."""
        if self._carried is not None and not self.ended.is_set():
            carrier, stream_id = self._carried
            carrier.reset(stream_id)
        self.end(RpcError(StatusCode.CANCELLED, "by this side"))

    def take_request(self) -> bytes:
        """The message as it is sent; it is not kept here."""
        request, self._request = self._request, b""
        return request

    def carried_by(self, carrier: Carrier, stream_id: int) -> None:
        self._carried = (carrier, stream_id)

    def receive(self, data: bytes, flow_bytes: int) -> None:
        """A piece of the stream of messages, which took ``flow_bytes`` of its window. Raises: ProtocolError."""
        self._begun.append(data)
        self._begun_bytes += len(data)
        if self._begun_bytes >= self._whole_bytes:
            self._split(self._begun[0] if len(self._begun) == 1 else b"".join(self._begun))
        self._ungranted_bytes += flow_bytes
        self._grant()

    def _split(self, data: bytes) -> None:
        """Takes the whole messages off the head of ``data`` and keeps the rest."""
        position = 0
        self._whole_bytes = _PREFIX_BYTES
        while len(data) - position >= _PREFIX_BYTES:
            if data[position]:
                raise ProtocolError("a compressed message, which nobody asked for")
            size = _PREFIX_BYTES + int.from_bytes(data[position + 1 : position + _PREFIX_BYTES], "big")
            if len(data) - position < size:
                self._whole_bytes = size
                break
            if not self.is_left:
                self._messages.append(data[position + _PREFIX_BYTES : position + size])
            position += size
        self._begun = [data[position:]] if position < len(data) else []
        self._begun_bytes = len(data) - position
        self._wake()

    def _grant(self) -> None:
        """Let the server send more, in large steps."""
        enough = self._ungranted_bytes >= WINDOW_BYTES // 2 and len(self._messages) < WAITING_MESSAGES
        if enough and self._carried is not None and not self.ended.is_set():
            carrier, stream_id = self._carried
            carrier.grant(stream_id, self._ungranted_bytes)
            self._ungranted_bytes = 0

    def end(self, error: RpcError | None) -> None:
        """Nothing more will come; ``error``: None when all went well."""
        if self.ended.is_set():
            return
        self._error = error
        self.ended.set()
        self._stop_timer()
        self._wake()
        self._on_end(self)

    def end_by(self, trailers: Mapping[str, str]) -> None:
        """The server has ended the call with these headers."""
        self.end(_error(trailers))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and (self._messages or self.ended.is_set()):
            self._waiter.set_result(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _error(trailers: Mapping[str, str]) -> RpcError | None:
    status = trailers.get("grpc-status")
    if status == "0":
        return None
    if status is None:
        http = trailers.get(":status", "200")
        code = StatusCode.UNAVAILABLE if http in ("429", "502", "503", "504") else StatusCode.UNKNOWN
        return RpcError(code, f"no gRPC status came, and HTTP status {http}")
    code = _CODES.get(int(status) if status.isdecimal() else -1, StatusCode.UNKNOWN)
    return RpcError(code, unquote(trailers.get("grpc-message", "")))
