"""GET /health/live, /health/ready and /health/probe."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from openai_frontend.context import ContextDependency
from triton_omni.errors import CapacityError

router = APIRouter(prefix="/health")


@router.get("/live")
async def live() -> dict[str, str]:
    """200 as long as this process answers."""
    return {"status": "live"}


@router.get("/ready", responses={503: {"description": "Not ready; says what is waited for"}})
async def ready(response: Response, context: ContextDependency) -> dict[str, Any]:
    """200 when tritonserver and all its models are ready, else 503; also 503 from the moment this server is to stop."""
    ends = context.drain.begun and not await context.drain.is_relieved()
    waiting_for = ["nothing: it is shutting down"] if ends else await context.engine.waiting_for()
    if waiting_for:
        response.status_code = 503
        return {"status": "not ready", "waiting_for": waiting_for}
    return {"status": "ready"}


@router.get("/probe")
async def probe(context: ContextDependency) -> dict[str, Any]:
    """200 when a small request has just come through every stage, with its times; also ("busy") when all places are
    taken, which is no failure. Those that ask at once share one request.
    """
    try:
        return {"status": "ok", **await context.probe.run()}
    except CapacityError:
        return {"status": "busy"}
