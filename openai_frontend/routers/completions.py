"""POST /v1/completions, which this model has no use for."""

from __future__ import annotations

from typing import NoReturn

from fastapi import APIRouter

from triton_omni.errors import InvalidRequestError

router = APIRouter()


@router.post("/v1/completions", include_in_schema=False, response_model=None)
async def refuse_completion() -> NoReturn:
    """A chat model has no prompt without its template."""
    raise InvalidRequestError("prompt", "this model only chats: use chat completions, POST /v1/chat/completions")
