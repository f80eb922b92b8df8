"""A chat completion request's body. Ranges are the runtime's (``triton_omni.sampling``), checked in ``translate``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from openai_frontend.audio import FORMATS
from openai_frontend.message_schemas import Message
from openai_frontend.strict import Int, Only, Strict, Text
from openai_frontend.tool_schemas import ResponseFormat, Tool, ToolChoice

# Each choice is a request of its own to the model.
MAX_CHOICES = 16
_Label: TypeAlias = Annotated[str, Field(max_length=64)]
_LabelValue: TypeAlias = Annotated[str, Field(max_length=512)]


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
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Beyond OpenAI's.
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    speaker: str | None = None
    talker: TalkerOptions | None = None
    chunk_frames: list[Int] | None = None
    initial_chunk_frames: Int | None = None
    chunk_policy: Literal["fixed", "adaptive"] | None = None
    mm_processor_kwargs: MmProcessorKwargs | None = None
    # Of vLLM-Omni's bench, in its dialect only.
    ref_audio: Any = None
    ref_text: Any = None
    task_type: Any = None
    language: Any = None
    max_new_tokens: Any = None
    return_stage_metrics: Any = None

    user: str | None = None
    metadata: Annotated[dict[_Label, _LabelValue], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    functions: Annotated[Any, Only([], instead="send tools")] = None
    function_call: Annotated[Any, Only("none", "auto", instead="send tools and tool_choice")] = None
    moderation: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: Annotated[Any, Only(False)] = None
    verbosity: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None
