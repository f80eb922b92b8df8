"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from openai_frontend import chunks, completions, vllm_omni
from openai_frontend.choices import answers
from openai_frontend.context import Context, ContextDependency
from openai_frontend.disconnect import EventStreamResponse, while_connected
from openai_frontend.openapi import CHAT_ANSWERS
from openai_frontend.schemas import ChatCompletionRequest
from openai_frontend.translate import translate
from triton_omni.errors import OmniError

router = APIRouter()


@router.post("/v1/chat/completions", response_class=Response, responses=CHAT_ANSWERS)
async def create_chat_completion(request: Request, body: ChatCompletionRequest, context: ContextDependency) -> Response:
    """Text, speech or both in answer to a conversation. With ``stream`` the answer comes as server-sent events."""
    return await while_connected(request.receive, _answer(request, body, context))


async def _answer(request: Request, body: ChatCompletionRequest, context: Context) -> Response:
    wants_counts = bool(body.stream_options and body.stream_options.continuous_usage_stats)
    for_bench = vllm_omni.is_bench(request.headers, continuous_usage=wants_counts)
    translation = await translate(body, context, for_bench=for_bench)
    shape = completions.Shape(
        model=body.model,
        choices=body.n or 1,
        wants_text=translation.wants_text,
        wants_logprobs=bool(body.logprobs),
        audio_format=translation.audio_format,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage="continuous_usage" in translation.wire,
        has_media=bool(translation.media),
        audio_lifetime_s=context.settings.audio_id_lifetime_s,
    )
    wire = {**translation.wire, "request_id": request.state.request_id}
    pieces = answers(context.engine, wire, translation.media, shape.choices)
    if shape.audio_format is not None:
        pieces = context.transcripts.recorded(pieces, shape.audio_id)
    try:
        if not body.stream:
            return Response(await completions.whole(pieces, shape), media_type="application/json")
        first = await anext(pieces)  # an error before it still has its own status
    except OmniError as error:
        raise translation.in_clients_words(error) from error
    writer = vllm_omni.Chunks(shape) if translation.dialect == vllm_omni.DIALECT else chunks.Chunks(shape)
    events = completions.server_sent_events(first, pieces, writer, translation.in_clients_words)
    return EventStreamResponse(events, source=pieces)
