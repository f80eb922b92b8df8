"""Work that ends when its client leaves, also while nothing is being sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from triton_omni.errors import RequestCancelledError

T = TypeVar("T")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """``await work``, cancelled as soon as the client closes the connection; the request's body has been read.

    Raises: RequestCancelledError when the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestCancelledError("the client closed the connection")
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(StreamingResponse):
    """Server-sent events made of ``source``. Whatever ends the response closes both; starlette's own response leaves
    that to the garbage collector and, by the server's ASGI version, waits for a send to fail.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, source: AsyncGenerator[Any, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._source), contextlib.aclosing(self._events):
            with contextlib.suppress(RequestCancelledError, OSError):  # OSError: servers whose send says it
                await while_connected(receive, self.stream_response(send))
