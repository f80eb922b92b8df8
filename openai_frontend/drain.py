"""A clean end: at the first stop signal readiness goes, new requests are refused, and what is open may finish.

A worker whose place others have taken (``worker_loop.py``) refuses nothing: what still comes over the connections that
it has is answered as the last of its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_frontend import errors
from openai_frontend.worker_loop import WorkerLoop

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Answered to the end: probes must see that the process lives but is not ready, and its last figures count.
_STAYS = ("/health/live", "/health/ready", "/metrics")
# How long whoever accepts connections may take to say who gets them.
_RELIEF_S = 5.0
# For the first request over a connection that a worker has taken just before others took its place.
_FIRST_REQUEST_S = 1.0


class Drain:
    """``begun``: no new requests; ``beginning``: set from then on, for what would go on without end.
    ``open_requests``: those that are being answered, WebSockets included.

    ``drain_s``: how long they may go on. Used on one event loop.
    """

    def __init__(self, drain_s: float) -> None:
        self.begun = False
        self.beginning = asyncio.Event()
        self.open_requests = 0
        self._drain_s = drain_s
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        self.open_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.open_requests -= 1
            if not self.open_requests:
                self._idle.set()

    async def is_relieved(self) -> bool:
        """Whether it has begun and other workers take what comes; asking is safe at any time."""
        loop = asyncio.get_running_loop()
        if not self.begun or not isinstance(loop, WorkerLoop):
            return False
        try:
            return await asyncio.wait_for(loop.hand_over(), _RELIEF_S)
        except TimeoutError:
            return False

    async def finish(self) -> None:
        """Begin, and return when nothing is open any more or the time is over."""
        self.begun = True
        self.beginning.set()
        relieved = await self.is_relieved()
        logger.info("stopping: %d open requests have %g s to finish", self.open_requests, self._drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                if relieved:
                    await asyncio.sleep(_FIRST_REQUEST_S)
                await self._idle.wait()
        if self.open_requests:
            logger.warning("%d requests are cut off after %g s", self.open_requests, self._drain_s)

    @contextlib.asynccontextmanager
    async def on_stop_signals(self) -> AsyncIterator[None]:
        """While entered the server gets the first stop signal when ``finish`` returns, and a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        loop = asyncio.get_running_loop()
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        servers: dict[int, Any] = {number: handler for number, handler in handlers.items() if callable(handler)}
        tasks: set[asyncio.Task[None]] = set()

        async def drain_and_pass_on(number: int) -> None:
            await self.finish()
            servers[number](number, None)

        def handle(number: int, frame: FrameType | None) -> None:
            if self.begun:
                servers[number](number, frame)
            else:
                self.begun = True
                loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(drain_and_pass_on(number))))

        for number in servers:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, server in servers.items():
                signal.signal(number, server)
            for task in tasks:
                task.cancel()


class DrainMiddleware:
    """Counts open requests; while draining it refuses new ones, or lets their connections end with them."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in _STAYS:
            return await self.app(scope, receive, send)
        if self.drain.begun and (scope["type"] == "websocket" or not await self.drain.is_relieved()):
            response = errors.response(errors.UnavailableError("this server is shutting down; ask again, or another"))
            response.headers["connection"] = "close"
            return await response(scope, receive, send)
        with self.drain.request():
            await self.app(scope, receive, _last_of_its_connection(send) if self.drain.begun else send)


def _last_of_its_connection(send: Send) -> Send:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return closing
