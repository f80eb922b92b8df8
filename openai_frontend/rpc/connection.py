"""Many calls over one TCP connection: HTTP/2 as far as a gRPC client needs it."""

from __future__ import annotations

import asyncio
import struct
from typing import cast

from grpc import StatusCode

from openai_frontend.rpc import frames
from openai_frontend.rpc.call import WINDOW_BYTES, Call, RpcError
from openai_frontend.rpc.frames import ProtocolError

# Of all calls together: each has a window of its own that bounds what waits here, so this one only must not be felt.
CONNECTION_WINDOW_BYTES = 2**30
# A piece of speech comes in one frame.
MAX_FRAME_BYTES = 2**18
_MAX_BLOCK_BYTES = 2**16
_RESET_CODES = {
    frames.REFUSED_STREAM: StatusCode.UNAVAILABLE,
    frames.CANCEL: StatusCode.CANCELLED,
    frames.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
}


class _Outgoing:
    """What is left of a call's request, and how much of it the server has room for."""

    def __init__(self, request: bytes, window: int) -> None:
        self.rest = memoryview(request)
        self.window = window


class Connection(asyncio.Protocol):
    """``authority``: the server's name as the caller wrote it. A call that outlives the connection is UNAVAILABLE."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._transport: asyncio.Transport | None = None
        self._reason = "the connection was closed"
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._max_calls = frames.LAST_STREAM_ID
        self._rest = b""  # of what came, less than a frame
        self._block: tuple[int, int, bytes] | None = None  # stream, flags and beginning of headers that go on
        self._ungranted_bytes = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._window = self._initial_window = frames.DEFAULT_WINDOW
        self._max_frame = frames.DEFAULT_FRAME

    @property
    def is_usable(self) -> bool:
        """Whether new calls may be started, now or when others have ended."""
        return self._transport is not None and self._next_id <= frames.LAST_STREAM_ID

    @property
    def has_room(self) -> bool:
        return self.is_usable and len(self._calls) < self._max_calls

    def start(self, call: Call) -> None:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self._calls[stream_id] = call
        call.carried_by(self, stream_id)
        block = frames.request_block(self._authority, call.method)
        self._write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, block))
        self._outgoing[stream_id] = _Outgoing(call.take_request(), self._initial_window)
        self._send()

    def grant(self, stream_id: int, size: int) -> None:
        self._write(frames.window_update(stream_id, size))

    def reset(self, stream_id: int) -> None:
        """Give a call up; what still comes of it is dropped."""
        self._write(frames.reset(stream_id, frames.CANCEL))
        self._forget(stream_id)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        values = {frames.HEADER_TABLE_SIZE: 0, frames.ENABLE_PUSH: 0, frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES}
        self._write(frames.PREFACE + frames.settings(values | {frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES}))
        self._write(frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end(list(self._calls), f"{self._reason}: {error}" if error else self._reason)

    def data_received(self, data: bytes) -> None:
        data, position = self._rest + data if self._rest else data, 0
        try:
            while len(data) - position >= frames.HEAD_BYTES:
                size, kind, flags, stream_id = frames.read_head(data, position)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {size} bytes, more than {MAX_FRAME_BYTES}")
                begin, end = position + frames.HEAD_BYTES, position + frames.HEAD_BYTES + size
                if end > len(data):
                    break
                self._take(kind, flags, stream_id, data[begin:end])
                position = end
        except (ProtocolError, struct.error, IndexError) as error:
            self._reason = f"the server does not speak HTTP/2 as expected: {error}"
            cast(asyncio.Transport, self._transport).abort()
            self._transport = None
        self._rest = data[position:]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise ProtocolError("headers that break off")
        match kind:
            case frames.DATA:
                self._take_data(flags, stream_id, payload)
            case frames.HEADERS:
                self._take_headers(flags, stream_id, frames.unpadded(flags, payload))
            case frames.CONTINUATION:
                self._take_more_headers(flags, stream_id, payload)
            case frames.RST_STREAM if stream_id in self._calls:
                code = frames.number(payload)
                error = RpcError(_RESET_CODES.get(code, StatusCode.INTERNAL), f"HTTP/2 error {code} ended the call")
                self._forget(stream_id).end(error)
            case frames.WINDOW_UPDATE:
                self._take_window(stream_id, frames.number(payload))
            case _ if stream_id == 0:
                self._take_for_all(kind, flags, payload)

    def _take_for_all(self, kind: int, flags: int, payload: bytes) -> None:
        match kind:
            case frames.SETTINGS if not flags & frames.ACK:
                self._take_settings(frames.read_settings(payload))
            case frames.PING if not flags & frames.ACK:
                self._write(frames.frame(frames.PING, frames.ACK, 0, payload))
            case frames.GOAWAY:
                self._take_goaway(frames.number(payload) & frames.LAST_STREAM_ID, payload[8:])

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._ungranted_bytes += len(payload)
        if self._ungranted_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self.grant(0, self._ungranted_bytes)
            self._ungranted_bytes = 0
        call = self._calls.get(stream_id)
        if call is None:
            return
        call.receive(frames.unpadded(flags & frames.PADDED, payload), len(payload))
        if flags & frames.END_STREAM:
            self._forget(stream_id).end_by({})

    def _take_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        """What opens an answer matters only where it is none of gRPC's."""
        if len(block) > _MAX_BLOCK_BYTES:
            raise ProtocolError(f"headers of more than {_MAX_BLOCK_BYTES} bytes")
        self._block = None if flags & frames.END_HEADERS else (stream_id, flags, block)
        if self._block is not None or stream_id not in self._calls:
            return
        headers = frames.read_block(block)
        if flags & frames.END_STREAM and stream_id not in self._outgoing:
            self._forget(stream_id).end_by(headers)
        elif flags & frames.END_STREAM or headers.get(":status") != "200":
            call = self._calls[stream_id]
            self.reset(stream_id)
            call.end_by(headers)

    def _take_more_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ProtocolError("headers go on that have not begun")
        _, begun_flags, begun = self._block
        self._take_headers(begun_flags | flags, stream_id, begun + payload)

    def _take_settings(self, values: dict[int, int]) -> None:
        self._max_calls = values.get(frames.MAX_CONCURRENT_STREAMS, self._max_calls)
        self._max_frame = values.get(frames.MAX_FRAME_SIZE, self._max_frame)
        before, self._initial_window = (
            self._initial_window,
            values.get(frames.INITIAL_WINDOW_SIZE, self._initial_window),
        )
        for outgoing in self._outgoing.values():
            outgoing.window += self._initial_window - before
        self._write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._send()

    def _take_window(self, stream_id: int, size: int) -> None:
        if stream_id == 0:
            self._window += size
        elif stream_id in self._outgoing:
            self._outgoing[stream_id].window += size
        self._send()

    def _take_goaway(self, last_id: int, told: bytes) -> None:
        """The server will leave: it answers what it has begun, and takes nothing new."""
        self._next_id = frames.LAST_STREAM_ID + 1
        self._reason = f"the server left {told.decode(errors='replace')}".rstrip()
        self._end([stream_id for stream_id in self._calls if stream_id > last_id], self._reason)
        self._close_when_used_up()

    def _end(self, stream_ids: list[int], reason: str) -> None:
        for call in [self._forget(stream_id) for stream_id in stream_ids]:
            call.end(RpcError(StatusCode.UNAVAILABLE, reason))

    def _forget(self, stream_id: int) -> Call:
        self._outgoing.pop(stream_id, None)
        call = self._calls.pop(stream_id)
        self._close_when_used_up()
        return call

    def _close_when_used_up(self) -> None:
        if not self.is_usable and not self._calls:
            self.close()

    def _send(self) -> None:
        """As much of the requests as the server has room for."""
        for stream_id, outgoing in list(self._outgoing.items()):
            while (
                outgoing.rest and (size := min(len(outgoing.rest), self._max_frame, self._window, outgoing.window)) > 0
            ):
                piece, outgoing.rest = outgoing.rest[:size], outgoing.rest[size:]
                self._window -= size
                outgoing.window -= size
                flags = 0 if outgoing.rest else frames.END_STREAM
                self._write(frames.head(frames.DATA, flags, stream_id, size))
                self._write(piece)
            if not outgoing.rest:
                del self._outgoing[stream_id]

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)
