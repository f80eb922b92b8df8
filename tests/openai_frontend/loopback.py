"""A scripted HTTP server on a loopback address, for tests of what fetches."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

Answer = Callable[["Loopback", asyncio.StreamWriter], Awaitable[None]]


class Loopback:
    """``requests``: the heads of all requests. ``client_left``: a client has closed its end; ``left``: and its request
    is over here, too.
    """

    def __init__(self, answers: dict[str, bytes | Answer]) -> None:
        self.answers = answers
        self.requests: list[str] = []
        self.sent_bytes = 0
        self.client_left = asyncio.Event()
        self.left = asyncio.Event()
        self.port = 0

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.sent_bytes += len(data)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        self.client_left.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                answer = self.answers[head.split()[1]]
                if isinstance(answer, bytes):
                    await self.send(writer, answer)
                    return
                watch = asyncio.ensure_future(self._watch(reader))
                try:
                    await answer(self, writer)
                finally:
                    watch.cancel()
        finally:
            writer.close()
            self.left.set()


@contextlib.asynccontextmanager
async def loopback(
    answers: dict[str, bytes | Answer], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Loopback]:
    server = Loopback(answers)
    listener = await asyncio.start_server(server._serve, host, 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def ok(body: bytes, *headers: str) -> bytes:
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def endless(server: Loopback, writer: asyncio.StreamWriter) -> None:
    """A chunked body that never ends."""
    await server.send(writer, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await server.send(writer, b"10000\r\n" + bytes(0x10000) + b"\r\n")


async def silent(server: Loopback, writer: asyncio.StreamWriter) -> None:
    """A body of which one byte comes, and then nothing."""
    await server.send(writer, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
    await server.client_left.wait()
