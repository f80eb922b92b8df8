"""POST /v1/audio/speech and GET /v1/audio/voices."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from openai_frontend import speech
from openai_frontend.audio import FORMATS
from openai_frontend.audio_schemas import SpeechRequest
from openai_frontend.context import ContextDependency
from openai_frontend.disconnect import EventStreamResponse, PiecewiseResponse, while_connected
from triton_omni.errors import OmniError

router = APIRouter(prefix="/v1/audio")

_FILE = {"schema": {"type": "string", "format": "binary"}}
_SPOKEN = dict.fromkeys(sorted({writer.media_type for writer in FORMATS.values()}), _FILE)


@router.post(
    "/speech",
    response_class=Response,
    responses={200: {"content": {**_SPOKEN, "text/event-stream": {"schema": {"type": "string"}}}}},
)
async def create_speech(request: Request, body: SpeechRequest, context: ContextDependency) -> Response:
    """``input`` read aloud: one audio file that grows as it is made, or with ``stream_format: sse`` as events."""
    translation = speech.translate_speech(body, context)
    audio_format = str(translation.audio_format)
    pieces = context.engine.generate({**translation.wire, "request_id": request.state.request_id}, [])
    try:
        first = await while_connected(request.receive, speech.first_sound(pieces))
    except OmniError as error:
        raise translation.in_clients_words(error) from error
    if body.stream_format == "sse":
        events = speech.server_sent_events(first, pieces, audio_format, translation.in_clients_words)
        return EventStreamResponse(events, source=pieces)
    media_type = FORMATS[audio_format].media_type
    return PiecewiseResponse(speech.file_pieces(first, pieces, audio_format), source=pieces, media_type=media_type)


@router.get("/voices")
async def list_voices(context: ContextDependency) -> dict[str, Any]:
    """The checkpoint's voices, the default one first."""
    data = [
        {"id": name, "object": "audio.voice", "name": name, "created_at": context.started} for name in context.voices
    ]
    return {"object": "list", "data": data, "voices": context.voices}
