"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from openai_frontend.audio import FORMATS
from openai_frontend.context import Context, ContextDependency

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(context: ContextDependency) -> dict[str, Any]:
    """The one model served here."""
    return {"object": "list", "data": [_model(context)]}


@router.get("/{model_id:path}")
async def retrieve_model(model_id: str, context: ContextDependency) -> dict[str, Any]:
    context.check_model(model_id)
    return _model(context)


def _model(context: Context) -> dict[str, Any]:
    """OpenAI's four keys and what a client wants to know of this model; the default voice is the first."""
    return {
        "id": context.settings.served_model,
        "object": "model",
        "created": context.started,
        "owned_by": "triton-omni",
        "max_model_len": context.config.context_tokens,
        "modalities": ["text", "audio"] if context.config.speaks else ["text"],
        "voices": context.voices,
        "audio_formats": list(FORMATS) if context.config.speaks else [],
    }
