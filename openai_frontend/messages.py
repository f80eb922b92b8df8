"""The messages of a chat completion request in omni_bls's own JSON, and the files that they bring."""

from __future__ import annotations

from typing import Any

from openai_frontend.context import Context
from openai_frontend.media import Budget, MediaKind, Reference, from_base64
from openai_frontend.message_schemas import (
    AssistantMessage,
    AudioUrlPart,
    FormerAudio,
    ImageUrlPart,
    InputAudioPart,
    Message,
    Part,
    TextPart,
    ToolMessage,
    VideoUrlPart,
)
from openai_frontend.tools import call_wire
from triton_omni.errors import InvalidRequestError


class Files:
    """The files of a request in the order of their parts, and where the client put each."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.budget = Budget(context.settings.max_media_bytes, context.settings.max_body_bytes)
        self.sources: list[bytes | Reference] = []
        self.names: dict[str, str] = {}

    @property
    def placeholders(self) -> list[bytes]:
        """Something for each file, those included that have yet to be got."""
        return [source if isinstance(source, bytes) else source.url.encode() for source in self.sources]

    def add(self, source: bytes | Reference, place: str) -> int:
        index = len(self.sources)
        self.sources.append(source)
        self.names |= {f"media[{index}]": place, f"{place}.media": place}
        return index

    def add_url(self, url: str, kind: MediaKind, place: str) -> dict[str, Any]:
        source = self.context.media.from_url(url, kind, field=f"{place}.{kind}_url.url", budget=self.budget)
        return {"type": kind, "media": self.add(source, place)}


def message_wire(message: Message, place: str, files: Files) -> dict[str, Any]:
    """``place``: where the client put it. Raises: InvalidRequestError naming the field from there on."""
    if isinstance(message, ToolMessage):
        said = message.content if isinstance(message.content, str) else "".join(p.text for p in message.content)
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": said}
    told: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            told["tool_calls"] = [call_wire(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
        if content is None and (message.audio is not None or not message.tool_calls):
            content = _former_transcript(message.audio, place, files.context)
    if isinstance(content, str):
        told["content"] = content
    elif content is not None:
        told["content"] = [_part(p, f"{place}.content[{i}]", files) for i, p in enumerate(content)]
    return told


def _former_transcript(audio: FormerAudio | None, place: str, context: Context) -> str:
    """What the assistant said, where its message carries only the audio."""
    if audio is None:
        raise InvalidRequestError(f"{place}.content", "must hold what the assistant said")
    if audio.transcript is not None:
        return audio.transcript
    if audio.id is None:
        raise InvalidRequestError(f"{place}.audio", "must hold the id or the transcript of a former answer")
    said = context.transcripts.get(audio.id)
    if said is None:
        raise InvalidRequestError(
            f"{place}.audio.id",
            f"{audio.id[:128]!r} is not known here or has expired; send the answer's transcript as content or "
            "audio.transcript",
        )
    return said


def _part(part: Part, place: str, files: Files) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case InputAudioPart():
            content = from_base64(part.input_audio.data, field=f"{place}.input_audio.data", budget=files.budget)
            return {"type": "audio", "media": files.add(content, place)}
        case AudioUrlPart():
            return files.add_url(part.audio_url.url, "audio", place)
        case ImageUrlPart():
            return files.add_url(part.image_url.url, "image", place)
        case VideoUrlPart():
            return files.add_url(part.video_url.url, "video", place)
