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
    task = asyncio.ensure_future(work)  # its own: every step of this one goes through all the middleware
    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done() and not watch.cancelled():
            raise RequestCancelledError("the client closed the connection") from None
        raise
    finally:
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PiecewiseResponse(StreamingResponse):
    """A body of ``pieces`` made of ``source``. Whatever ends the response closes both; starlette's own response leaves
    that to the garbage collector and, by the server's ASGI version, waits for a send to fail.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], *, source: AsyncGenerator[Any, None], media_type: str | None = None
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(pieces, headers=headers, media_type=media_type)
        self._pieces, self._source = pieces, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._source), contextlib.aclosing(self._pieces):
            with contextlib.suppress(RequestCancelledError, OSError):  # OSError: servers whose send says it
                await while_connected(receive, self.stream_response(send))


class EventStreamResponse(PiecewiseResponse):
    """Server-sent events."""

    media_type = "text/event-stream"
