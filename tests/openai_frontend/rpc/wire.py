"""The server's side of a connection in this process: what was written to it, and bytes that it answers."""

from __future__ import annotations

import asyncio

import hpack

from openai_frontend.rpc import frames
from openai_frontend.rpc.call import Call
from openai_frontend.rpc.connection import Connection

OPENED = {":status": "200", "content-type": "application/grpc"}
DONE = {"grpc-status": "0"}


def message(data: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(data).to_bytes(4, "big") + data


class Wire(asyncio.Transport):
    """A connection's transport; ``sent`` are its frames: (kind, flags, stream, payload)."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.connection = Connection("server:1")
        self.connection.connection_made(self)
        assert self.written.startswith(frames.PREFACE)
        self.written = self.written.removeprefix(frames.PREFACE)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def sent(self) -> list[tuple[int, int, int, bytes]]:
        """Since the last call."""
        data, found = self.written, []
        self.written = b""
        while data:
            size, kind, flags, stream_id = frames.read_head(data, 0)
            found.append((kind, flags, stream_id, data[frames.HEAD_BYTES : frames.HEAD_BYTES + size]))
            data = data[frames.HEAD_BYTES + size :]
        return found

    def call(self, request: bytes = b"ask", stall_timeout_s: float = 60.0) -> Call:
        call = Call("/package.Service/Method", request, stall_timeout_s, lambda call: None)
        self.connection.start(call)
        return call

    def answers(self, *parts: bytes) -> None:
        self.connection.data_received(b"".join(parts))


def data(*messages: bytes, stream_id: int = 1, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, b"".join(map(message, messages)))


def block(values: dict[str, str]) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(values.items())


def headers(values: dict[str, str], stream_id: int = 1, flags: int = frames.END_HEADERS) -> bytes:
    return frames.frame(frames.HEADERS, flags, stream_id, block(values))


def trailers(values: dict[str, str], stream_id: int = 1) -> bytes:
    return headers(values, stream_id, frames.END_HEADERS | frames.END_STREAM)
