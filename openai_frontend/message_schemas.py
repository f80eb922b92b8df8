"""The messages of a conversation, and what their parts bring along."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from openai_frontend.strict import Int, Only, Strict, Text
from openai_frontend.tool_schemas import ToolCall


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
    """``parsed``: what the SDK has read in ``content``."""

    role: Literal["assistant"]
    content: TextOnly | None = None
    audio: FormerAudio | None = None
    name: Annotated[Any, Only()] = None
    refusal: Annotated[Any, Only()] = None
    tool_calls: list[ToolCall] | None = None
    function_call: Annotated[Any, Only(instead="send tool_calls")] = None
    annotations: Annotated[Any, Only([])] = None
    parsed: Any = None


class ToolMessage(Strict):
    """What a function returned that a former answer called."""

    role: Literal["tool"]
    tool_call_id: Annotated[Text, Field(min_length=1)]
    content: TextOnly
    name: Annotated[Any, Only()] = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
