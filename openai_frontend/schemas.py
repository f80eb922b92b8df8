"""Request bodies. Unknown keys and wrong types are errors; parameters of OpenAI's that this server does not have may
be sent with the value that asks for nothing, and are refused by name otherwise. Ranges are the runtime's
(``triton_omni.sampling``), checked in ``translate``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from openai_frontend.audio import FORMATS
from triton_omni.options import unknown_key_message


class Strict(BaseModel):
    """Nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                key = key.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair breaks pydantic's errors
                message = unknown_key_message(key, cls.model_fields)
                raise PydanticCustomError("unknown_parameter", "{message}", {"key": key, "message": message})
        return values


class Only:
    """A parameter that may be there but must not ask for anything: null, or one of ``neutral``."""

    def __init__(self, *neutral: Any) -> None:
        self.neutral = neutral

    def check(self, value: Any) -> Any:
        if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in self.neutral):
            return value
        allowed = "".join(f" or send {json.dumps(neutral)}" for neutral in self.neutral)
        raise PydanticCustomError("unsupported", "{message}", {"message": f"is not supported; leave it out{allowed}"})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}


def _valid_unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("bad_unicode", "must be valid Unicode; it holds half of a surrogate pair") from None
    return value


Text: TypeAlias = Annotated[str, AfterValidator(_valid_unicode)]
_Label: TypeAlias = Annotated[str, Field(max_length=64)]
_LabelValue: TypeAlias = Annotated[str, Field(max_length=512)]
Int: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _kind(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


_TextOrParts = Discriminator(
    _kind,
    custom_error_type="text_or_parts",
    custom_error_message="must be a string or a list of content parts",
)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class InputAudio(Strict):
    """``data``: base64 of a whole file. What it holds is seen by looking; ``format`` is not relied on."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "m4a", "webm"]


class InputAudioPart(Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(Strict):
    url: str


class AudioUrlPart(Strict):
    type: Literal["audio_url"]
    audio_url: AudioUrl


class ImageUrl(Strict):
    url: str
    detail: Annotated[Any, Only("auto")] = None


class ImageUrlPart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(Strict):
    url: str


class VideoUrlPart(Strict):
    type: Literal["video_url"]
    video_url: VideoUrl


Part: TypeAlias = Annotated[
    TextPart | InputAudioPart | AudioUrlPart | ImageUrlPart | VideoUrlPart,
    Field(discriminator="type"),
]
TextOnly: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")],
    _TextOrParts,
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(min_length=1), Tag("parts")],
    _TextOrParts,
]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: TextOnly
    name: Annotated[Any, Only()] = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: Annotated[Any, Only()] = None


class FormerAudio(Strict):
    """The audio of a former answer: its ``id`` alone while the server keeps what was said, else with the transcript,
    which is what the model reads.
    """

    id: str | None = None
    transcript: str | None = None
    data: str | None = None
    expires_at: Int | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: TextOnly | None = None
    audio: FormerAudio | None = None
    name: Annotated[Any, Only()] = None
    refusal: Annotated[Any, Only()] = None
    tool_calls: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None


Message: TypeAlias = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


def _known_format(value: str) -> str:
    if value not in FORMATS:
        message = f"Invalid audio format; must be one of {', '.join(FORMATS)}"
        raise PydanticCustomError("unknown_format", "{message}", {"message": message})
    return value


class AudioOptions(Strict):
    """``voice``: one of the checkpoint's, in any case. ``format``: default pcm16 in streams, else wav. ``dialect``
    "vllm-omni": a stream as vLLM-Omni's clients read it, each chunk of speech a file (default wav) in ``content``.
    """

    voice: str | None = None
    dialect: Literal["openai", "vllm-omni"] | None = None
    speed: Annotated[Any, Only(1)] = None
    format: Annotated[str, AfterValidator(_known_format), WithJsonSchema({"enum": list(FORMATS)})] | None = None


class StreamOptions(Strict):
    """``continuous_usage_stats``: every chunk carries the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


class TalkerOptions(Strict):
    """``triton_omni.sampling.TalkerSampling``, every field optional."""

    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_frames: Int | None = None
    min_frames: Int | None = None
    seed: Int | None = None


class MmProcessorKwargs(Strict):
    """``use_audio_in_video``: the model hears the sound tracks of videos, too."""

    use_audio_in_video: bool | None = None


class ChatCompletionRequest(Strict):
    """POST /v1/chat/completions. ``user``, ``metadata``, ``safety_identifier`` and ``prompt_cache_key`` are labels of
    the caller's: they are checked, kept nowhere, and change nothing. Nothing is stored: ``store`` may only be false.
    """

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1)] | None = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    stop: Text | list[Text] | None = None
    seed: Int | None = None
    n: Annotated[Any, Only(1)] = None

    # Beyond OpenAI's.
    top_k: Int | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    speaker: str | None = None
    talker: TalkerOptions | None = None
    chunk_frames: list[Int] | None = None
    initial_chunk_frames: Int | None = None
    mm_processor_kwargs: MmProcessorKwargs | None = None
    # Of vLLM-Omni's bench, in its dialect only.
    ref_audio: Any = None
    ref_text: Any = None
    task_type: Any = None
    language: Any = None
    max_new_tokens: Any = None

    user: str | None = None
    metadata: Annotated[dict[_Label, _LabelValue], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    logit_bias: Annotated[Any, Only({})] = None
    logprobs: Annotated[Any, Only(False)] = None
    top_logprobs: Annotated[Any, Only(0)] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Only(True)] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: Annotated[Any, Only(False)] = None
    min_p: Annotated[Any, Only(0)] = None
