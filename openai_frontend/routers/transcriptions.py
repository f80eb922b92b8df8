"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from openai_frontend import transcriptions
from openai_frontend.audio_schemas import TranscriptionForm, TranslationForm
from openai_frontend.context import Context, ContextDependency
from openai_frontend.disconnect import EventStreamResponse, while_connected
from triton_omni.errors import OmniError

router = APIRouter(prefix="/v1/audio")

_TEXT = {"schema": {"type": "string"}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/json": {"schema": {"type": "object"}}, "text/plain": _TEXT, "text/event-stream": _TEXT}
    }
}


def _described(form_type: type[TranslationForm]) -> dict[str, Any]:
    """The multipart body for /openapi.json, which FastAPI cannot see: forms are read here, with their own limits."""
    schema = form_type.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post(
    "/transcriptions", response_class=Response, responses=_ANSWERS, openapi_extra=_described(TranscriptionForm)
)
async def create_transcription(request: Request, context: ContextDependency) -> Response:
    """What is said in ``file``."""
    return await _answer(request, context, TranscriptionForm)


@router.post("/translations", response_class=Response, responses=_ANSWERS, openapi_extra=_described(TranslationForm))
async def create_translation(request: Request, context: ContextDependency) -> Response:
    """What is said in ``file``, in English."""
    return await _answer(request, context, TranslationForm)


async def _answer(request: Request, context: Context, form_type: type[TranslationForm]) -> Response:
    form, content = await transcriptions.read_form(request, form_type, context.settings.max_media_bytes)
    duration_s = await asyncio.to_thread(transcriptions.length_s, content)
    translation = transcriptions.translate_form(form, content, duration_s, context)
    wire = {**translation.wire, "request_id": request.state.request_id}
    pieces = context.engine.generate(wire, translation.media)
    try:
        if form.stream:
            first = await while_connected(request.receive, anext(pieces))
            events = transcriptions.server_sent_events(first, pieces, translation.in_clients_words)
            return EventStreamResponse(events, source=pieces)
        text, counts = await while_connected(request.receive, transcriptions.whole(pieces))
    except OmniError as error:
        raise translation.in_clients_words(error) from error
    if form.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if form.response_format == "verbose_json" and duration_s is not None:
        answer = transcriptions.verbose(form, text, duration_s)
    else:
        answer = {"text": text, "usage": transcriptions.usage(counts)}
    return Response(orjson.dumps(answer), media_type="application/json")
