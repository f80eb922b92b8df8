"""Plain ASGI middleware."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestIdMiddleware:
    """Gives every request an id: ``request.state.request_id`` and the response's x-request-id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Counts what really arrives; a declared length that is too large is refused before anything is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        received = int(declared[:18]) if declared.isdecimal() and int(declared[:18]) > self.max_bytes else 0

        async def counting_receive() -> Message:
            nonlocal received
            if received <= self.max_bytes:
                message = await receive()
                received += len(message.get("body", b""))
                if received <= self.max_bytes:
                    return message
            # Closed: on a connection that stays, the server would read the rest of the body, however long.
            told = f"the request's body is larger than {self.max_bytes} bytes"
            raise HTTPException(413, told, {"connection": "close"})

        await self.app(scope, counting_receive, send)
