"""GET /metrics and GET /version."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter
from starlette.responses import Response

from openai_frontend.context import ContextDependency
from openai_frontend.metrics import CONTENT_TYPE, of_triton

router = APIRouter()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def show_metrics(context: ContextDependency) -> Response:
    """The frontend's figures (of all its workers) and, where it was told their address, tritonserver's."""
    figures = context.metrics.exposition()
    if context.settings.triton_metrics_url:
        figures += await of_triton(context.settings.triton_metrics_url)
    return Response(figures, headers={"content-type": CONTENT_TYPE})


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Of this project; ``unknown`` where it runs without being installed."""
    try:
        return {"version": metadata.version("triton-omni")}
    except metadata.PackageNotFoundError:
        return {"version": "unknown"}
