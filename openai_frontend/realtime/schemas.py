"""Client events. The beta's flat names for what a session sets are taken, too; what this server does not have is
refused by name unless it asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, ValidationError

from openai_frontend.errors import validation_error
from openai_frontend.realtime.formats import BETA_NAMES
from openai_frontend.realtime.item_schemas import ItemBody
from openai_frontend.strict import Int, JsonObject, Only, Strict, Text
from openai_frontend.tool_schemas import Name
from triton_omni.errors import InvalidRequestError


def _beta_format(value: Any) -> Any:
    return {"type": BETA_NAMES[value]} if isinstance(value, str) and value in BETA_NAMES else value


class Format(Strict):
    """``rate``: of audio/pcm; G.711 has 8 kHz."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: Literal[24000, 16000, 8000] | None = None


AnyFormat: TypeAlias = Annotated[Format, BeforeValidator(_beta_format)]
Modalities: TypeAlias = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)]
MaxTokens: TypeAlias = Literal["inf"] | Annotated[int, Field(ge=1, le=2**31)]


class Tool(Strict):
    """A function that the model may call; ``parameters``: JSON Schema of an object."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None


class NamedTool(Strict):
    type: Literal["function"]
    name: Text


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")] | Annotated[NamedTool, Tag("one function")],
    Discriminator(lambda value: "a mode" if isinstance(value, str) else "one function"),
]


class TurnDetection(Strict):
    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=50, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Annotated[Any, Only()] = None


class AudioInput(Strict):
    format: AnyFormat | None = None
    turn_detection: TurnDetection | None = None
    noise_reduction: Annotated[Any, Only()] = None
    transcription: Annotated[Any, Only()] = None


class AudioOutput(Strict):
    format: AnyFormat | None = None
    voice: str | None = None
    speed: Annotated[Any, Only(1)] = None


class Audio(Strict):
    input: AudioInput | None = None
    output: AudioOutput | None = None


class SessionPatch(Strict):
    """What is absent stays as it is."""

    type: Literal["realtime"] | None = None
    model: str | None = None
    instructions: Text | None = None
    output_modalities: Modalities | None = None
    audio: Audio | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[Any, Only("disabled")] = None
    tracing: Annotated[Any, Only()] = None
    reasoning: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    include: Annotated[Any, Only([])] = None

    # The beta's.
    modalities: Modalities | None = None
    voice: str | None = None
    input_audio_format: AnyFormat | None = None
    output_audio_format: AnyFormat | None = None
    turn_detection: TurnDetection | None = None
    temperature: float | None = None
    max_response_output_tokens: MaxTokens | None = None
    input_audio_transcription: Annotated[Any, Only()] = None
    input_audio_noise_reduction: Annotated[Any, Only()] = None
    speed: Annotated[Any, Only(1)] = None


class ResponseOptions(Strict):
    """``conversation`` "none": the answer is not remembered. ``input``: instead of the conversation."""

    instructions: Text | None = None
    output_modalities: Modalities | None = None
    audio: Audio | None = None
    max_output_tokens: MaxTokens | None = None
    conversation: Literal["auto", "none"] | None = None
    input: list[ItemBody] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt: Annotated[Any, Only()] = None
    reasoning: Annotated[Any, Only()] = None
    # The beta's.
    modalities: Modalities | None = None
    voice: str | None = None
    output_audio_format: AnyFormat | None = None
    temperature: float | None = None
    max_response_output_tokens: MaxTokens | None = None


class _Event(Strict):
    event_id: Annotated[str, Field(max_length=512)] | None = None


class SessionUpdate(_Event):
    type: Literal["session.update"]
    session: SessionPatch


class AudioAppend(_Event):
    type: Literal["input_audio_buffer.append"]
    audio: str


class AudioCommit(_Event):
    type: Literal["input_audio_buffer.commit"]


class AudioClear(_Event):
    type: Literal["input_audio_buffer.clear"]


class ItemCreate(_Event):
    """``previous_item_id``: null, after the last; "root", before the first."""

    type: Literal["conversation.item.create"]
    previous_item_id: str | None = None
    item: ItemBody


class ItemDelete(_Event):
    type: Literal["conversation.item.delete"]
    item_id: str


class ItemRetrieve(_Event):
    type: Literal["conversation.item.retrieve"]
    item_id: str


class ItemTruncate(_Event):
    type: Literal["conversation.item.truncate"]
    item_id: str
    content_index: Int
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseCreate(_Event):
    type: Literal["response.create"]
    response: ResponseOptions | None = None


class ResponseCancel(_Event):
    type: Literal["response.cancel"]
    response_id: str | None = None


ClientEvent: TypeAlias = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | ItemCreate
    | ItemDelete
    | ItemRetrieve
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
_EVENT: TypeAdapter[ClientEvent] = TypeAdapter(Annotated[ClientEvent, Field(discriminator="type")])

_TYPES = tuple(str(get_args(event.model_fields["type"].annotation)[0]) for event in get_args(ClientEvent))


def parse_event(body: Any) -> ClientEvent:
    """Raises: InvalidRequestError naming the field."""
    if not isinstance(body, dict):
        raise InvalidRequestError("body", "body: an event must be a JSON object")
    if body.get("type") not in _TYPES:
        got = f"got {body['type']!r:.64}" if "type" in body else "it is missing"
        raise InvalidRequestError("type", f"type: must be one of {', '.join(_TYPES)}; {got}")
    try:
        return _EVENT.validate_python(body)
    except ValidationError as error:
        # The first step of each place is the event's type, where FastAPI's errors have "body".
        raise validation_error(error.errors(), body) from None
