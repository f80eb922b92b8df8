"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from openai_frontend import completions
from openai_frontend.context import ContextDependency
from openai_frontend.disconnect import EventStreamResponse, while_connected
from openai_frontend.schemas import ChatCompletionRequest
from openai_frontend.translate import translate
from triton_omni.errors import OmniError

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, body: ChatCompletionRequest, context: ContextDependency) -> Response:
    """Text, speech or both in answer to a conversation. With ``stream`` the answer comes as server-sent events."""
    translation = translate(body, context)
    shape = completions.Shape(
        model=body.model,
        wants_text=translation.wants_text,
        audio_format=translation.audio_format,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_media=bool(translation.media),
    )
    wire = {**translation.wire, "request_id": request.state.request_id}
    pieces = context.engine.generate(wire, translation.media)
    try:
        if not body.stream:
            answer = await while_connected(request.receive, completions.whole(pieces, shape))
            return Response(answer, media_type="application/json")
        first = await while_connected(request.receive, anext(pieces))  # an error before it still has its own status
    except OmniError as error:
        raise translation.in_clients_words(error) from error
    events = completions.server_sent_events(first, pieces, shape, translation.in_clients_words)
    return EventStreamResponse(events, source=pieces)
