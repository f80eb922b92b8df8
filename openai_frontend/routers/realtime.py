"""WebSocket /v1/realtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import orjson
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from openai_frontend import errors
from openai_frontend.context import Context
from openai_frontend.realtime.conversation import new_id
from openai_frontend.realtime.session import RealtimeSession
from triton_omni.errors import InvalidRequestError, OmniError

router = APIRouter()

SUBPROTOCOL = "realtime"
_GOING_AWAY = 1001


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """A conversation in OpenAI's realtime events. ``model`` names the model, as everywhere."""
    context: Context = websocket.app.state.context
    if not _may_ask(websocket, context):
        error = InvalidRequestError("origin", "origin: pages from elsewhere may not ask this server; see cors_origins")
        response = errors.response(error)
        response.status_code = 403
        return await websocket.send_denial_response(response)
    try:
        if (model := websocket.query_params.get("model")) is None:
            raise InvalidRequestError("model", "model: is missing; ask for /v1/realtime?model=MODEL")
        context.check_model(model)
    except OmniError as error:
        return await websocket.send_denial_response(errors.response(error))
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
    session = RealtimeSession(context, _sender(websocket))
    leaving = asyncio.ensure_future(_leave_when_draining(websocket, context, session))
    try:
        await session.serve(_incoming(websocket))
    finally:
        leaving.cancel()


async def _leave_when_draining(websocket: WebSocket, context: Context, session: RealtimeSession) -> None:
    """A session has no end of its own: when the server is to stop, its last answer is that."""
    await context.drain.beginning.wait()
    await session.answered()
    await websocket.close(_GOING_AWAY, "this server is shutting down")


def _may_ask(websocket: WebSocket, context: Context) -> bool:
    """Whether no page asks, or one of ours or of ``cors_origins``: browsers leave that to servers of WebSockets."""
    origin, allowed = websocket.headers.get("origin"), context.settings.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return True
    return urlsplit(origin).netloc == websocket.headers.get("host")


def _sender(websocket: WebSocket) -> Any:
    lock = asyncio.Lock()

    async def send(event: str, **fields: Any) -> None:
        text = orjson.dumps({"type": event, "event_id": new_id("event"), **fields}).decode()
        async with lock:
            if websocket.application_state is WebSocketState.DISCONNECTED:
                raise WebSocketDisconnect(_GOING_AWAY)
            await websocket.send_text(text)

    return send


async def _incoming(websocket: WebSocket) -> AsyncIterator[str | bytes]:
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        yield message.get("text") or message.get("bytes") or b""
