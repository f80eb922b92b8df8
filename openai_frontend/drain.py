"""A clean end: at the first stop signal readiness goes, new requests are refused, and what is open may finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from openai_frontend import errors

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Answered to the end: probes must see that the process lives but is not ready, and its last figures count.
_STAYS = ("/health/live", "/health/ready", "/metrics")


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

    async def finish(self) -> None:
        """Begin, and return when nothing is open any more or the time is over."""
        self.begun = True
        self.beginning.set()
        logger.info("stopping: %d open requests have %g s to finish", self.open_requests, self._drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._drain_s)
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
    """Counts open requests; refuses new ones while draining."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in _STAYS:
            return await self.app(scope, receive, send)
        if self.drain.begun:
            response = errors.response(errors.UnavailableError("this server is shutting down; ask again, or another"))
            response.headers["connection"] = "close"
            return await response(scope, receive, send)
        with self.drain.request():
            await self.app(scope, receive, send)
