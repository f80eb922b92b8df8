"""A chat completion request in omni_bls's own JSON, and the names of its fields back again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from openai_frontend import vllm_omni
from openai_frontend.context import Context
from openai_frontend.messages import Files, message_wire
from openai_frontend.schemas import ChatCompletionRequest
from openai_frontend.tools import format_note, format_wire, moved_tools, tools_wire
from triton_omni.errors import InvalidRequestError, OmniError
from triton_omni.pipeline.chunk_policy import ChunkPlan

_THINKER_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "seed"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """``wire``: REQUEST of omni_bls; ``media``: the files its parts point at by index. ``wants_text``: text is among
    the modalities; ``audio_format``: None when no speech is asked for. ``names``: the wire's field names in the
    client's words where they differ. ``dialect``: how the answer is written, "openai" or "vllm-omni". ``prepended``: so
    many messages stand before the client's.
    """

    wire: dict[str, Any]
    media: list[bytes]
    wants_text: bool
    audio_format: str | None
    names: Mapping[str, str]
    dialect: str = "openai"
    prepended: int = 0

    def in_clients_words(self, error: OmniError) -> OmniError:
        """The same error about the field as the client wrote it."""
        if isinstance(error, InvalidRequestError):
            return _named(type(error)(self._clients_field(str(error.field)), error.message))
        return error

    def _clients_field(self, field: str) -> str:
        field = field.removeprefix("thinker.")
        field = re.sub(r"^messages\[(\d+)\]", lambda match: f"messages[{int(match[1]) - self.prepended}]", field)
        for there, here in self.names.items():
            if f"{field.lower()}.".startswith(f"{there}."):
                return here + field[len(there) :]
        return field


async def translate(body: ChatCompletionRequest, context: Context, *, for_bench: bool = False) -> Translation:
    """Checked by the runtime's own parser, so what it would refuse is refused before any stage works, and before any
    file is fetched. ``for_bench``: vLLM-Omni's bench asks, in that dialect unless it says otherwise.

    Raises: InvalidRequestError in the client's field names, NotFoundError for another model.
    """
    try:
        files = Files(context)
        translation = checked(_translate(body, context, files, _dialect(body, for_bench)), context)
        return dataclasses.replace(translation, media=await context.media.load(files.sources, files.budget))
    except InvalidRequestError as error:
        raise _named(error) from None


def checked(translation: Translation, context: Context) -> Translation:
    """As it is, once the runtime's parser has accepted it. Raises: InvalidRequestError in the client's field names."""
    try:
        context.parser.check(translation.wire, translation.media)
    except InvalidRequestError as error:
        raise translation.in_clients_words(error) from None
    return translation


def _named(error: InvalidRequestError) -> InvalidRequestError:
    """With the field at the head of the message: it must be told also by clients that show only the message."""
    field = str(error.field)
    return error if error.message.startswith(f"{field}:") else type(error)(field, f"{field}: {error.message}")


def _translate(body: ChatCompletionRequest, context: Context, files: Files, dialect: str) -> Translation:
    context.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "has no effect without stream: true")
    modalities = _modalities(body, dialect)
    speaker_name, speaker = _speaker(body)
    limit_name, max_tokens = _max_tokens(body)
    _check_choices(body, modalities, dialect)
    thinker = {name: getattr(body, name) for name in _THINKER_FIELDS} | {"max_tokens": max_tokens}
    thinker |= {"logprobs": _logprobs(body), "response_format": format_wire(body.response_format)}
    if body.stop is not None:
        thinker["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    talker = body.talker.model_dump() if body.talker else {}
    if "audio" in modalities and talker.get("seed") is None:
        talker["seed"] = body.seed  # one seed: one text and one voice
    prompt = _default_prompt(body, context, modalities)
    wire = {
        "messages": [
            *prompt,
            *(message_wire(message, f"messages[{i}]", files) for i, message in enumerate(body.messages)),
            *format_note(body.response_format),
        ],
        "modalities": modalities,
        "speaker": speaker,
        "thinker": given(thinker),
        "talker": given(talker),
        "chunk_frames": _chunk_frames(body),
        "chunk_policy": body.chunk_policy,
        "use_audio_in_video": body.mm_processor_kwargs and body.mm_processor_kwargs.use_audio_in_video,
        "continuous_usage": _continuous_usage(body, dialect) or None,
    } | tools_wire(body.tools, body.tool_choice, body.parallel_tool_calls)
    in_pieces = body.stream and dialect == "openai"
    audio_format = (body.audio and body.audio.format) or ("pcm16" if in_pieces else "wav")
    return Translation(
        wire=given(wire),
        media=files.placeholders,
        wants_text="text" in modalities,
        audio_format=audio_format if "audio" in modalities else None,
        dialect=dialect,
        prepended=len(prompt),
        names=files.names
        | {"speaker": speaker_name, "max_tokens": limit_name}
        | ({"logprobs": "top_logprobs"} if body.top_logprobs else {})
        | moved_tools(wire, body.tools)
        | {"use_audio_in_video": "mm_processor_kwargs.use_audio_in_video"},
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the client has set; every default is the runtime's."""
    return {key: value for key, value in values.items() if value is not None and value != {}}


def _dialect(body: ChatCompletionRequest, for_bench: bool) -> str:
    asked = body.audio.dialect if body.audio else None
    if asked == vllm_omni.DIALECT and not body.stream:
        raise InvalidRequestError("audio.dialect", "has no effect without stream: true")
    dialect = asked or (vllm_omni.DIALECT if for_bench and body.stream else "openai")
    for name in vllm_omni.IGNORED_FIELDS:
        if dialect == "openai" and getattr(body, name) is not None:
            raise InvalidRequestError(name, 'is not supported; leave it out (audio.dialect "vllm-omni" ignores it)')
    return dialect


def _continuous_usage(body: ChatCompletionRequest, dialect: str) -> bool:
    asked = bool(body.stream_options and body.stream_options.continuous_usage_stats)
    return asked or dialect == vllm_omni.DIALECT


def _chunk_frames(body: ChatCompletionRequest) -> list[int] | None:
    if body.initial_chunk_frames is None:
        return body.chunk_frames
    if body.chunk_frames is not None:
        raise InvalidRequestError("initial_chunk_frames", "contradicts chunk_frames; send one of them")
    try:
        return list(ChunkPlan.growing_from(body.initial_chunk_frames).frames)
    except InvalidRequestError as error:
        raise InvalidRequestError("initial_chunk_frames", error.message) from None


def _modalities(body: ChatCompletionRequest, dialect: str) -> list[str]:
    """Text unless asked otherwise; ``audio`` without modalities, and vLLM-Omni's dialect, ask for both."""
    both = body.audio is not None or dialect == vllm_omni.DIALECT
    modalities = list(body.modalities or (["text", "audio"] if both else ["text"]))
    for name in ("audio", "speaker", "talker", "chunk_frames", "initial_chunk_frames", "chunk_policy"):
        if "audio" not in modalities and getattr(body, name) is not None:
            raise InvalidRequestError(name, "has no effect without 'audio' in modalities; add it or leave this out")
    return modalities


def _default_prompt(body: ChatCompletionRequest, context: Context, modalities: list[str]) -> list[dict[str, Any]]:
    """The operator's system message for speech, where the client brings none."""
    prompt = context.settings.speech_system_prompt
    if not prompt or "audio" not in modalities or body.messages[0].role in ("system", "developer"):
        return []
    return [{"role": "system", "content": prompt}]


def _speaker(body: ChatCompletionRequest) -> tuple[str, str | None]:
    """The client's name for the voice's field, and the voice."""
    voice = body.audio.voice if body.audio else None
    if body.speaker is None:
        return "audio.voice", voice
    if voice is not None and voice.lower() != body.speaker.lower():
        raise InvalidRequestError("speaker", f"contradicts audio.voice ({voice!r}); send one of them")
    return "speaker", body.speaker


def _max_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """The client's name for the limit, and the limit."""
    if body.max_completion_tokens is None:
        return "max_tokens", body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("max_tokens", "contradicts max_completion_tokens; send one of them")
    return "max_completion_tokens", body.max_completion_tokens


def _check_choices(body: ChatCompletionRequest, modalities: list[str], dialect: str) -> None:
    """Several choices are text; vLLM-Omni's clients read one."""
    if body.n in (None, 1):
        return
    if "audio" in modalities:
        raise InvalidRequestError("n", f"must be 1 with 'audio' in modalities, got {body.n}")
    if dialect == vllm_omni.DIALECT:
        raise InvalidRequestError("n", f"must be 1 in vLLM-Omni's dialect, got {body.n}")


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives of each token are told; None: nothing is."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs", "has no effect without logprobs: true")
    return None
