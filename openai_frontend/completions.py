"""omni_bls's pieces of an answer as OpenAI's chat completions, whole or streamed.

Where text and speech are both asked for, text is in ``content`` (as for text alone) and also in ``audio.transcript``
(where OpenAI's audio models have it): ``content`` + ``audio.transcript`` of the joined deltas equal those of the whole
answer. Without text among the modalities ``content`` is null and the transcript alone carries it.

A stream is: a delta with the role; deltas of text and of audio as they come (the first with ``audio`` brings
``audio.id``); with speech, one with ``audio.expires_at``; one with ``finish_reason``; on request one with ``usage`` and
no choices; ``[DONE]``. Text fields of all deltas may be joined as they are, base64 included. A chunk's extra
``modality`` tells text from audio without looking inside. Until ``expires_at`` a later request may name the answer by
its ``audio.id``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import orjson

from openai_frontend import errors
from openai_frontend.audio import FORMATS, SAMPLE_BYTES, AudioStream, base64_text
from openai_frontend.engine import Delta
from openai_frontend.events import event
from triton_omni.errors import OmniError
from triton_omni.model_config import CODEC_FRAMES_PER_SECOND, SAMPLE_RATE_HZ

Reword = Callable[[OmniError], OmniError]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What the client asked its answer to look like. ``audio_format``: None without speech. ``continuous_usage``: each
    chunk carries the usage so far. ``audio_lifetime_s``: how long the answer can be named by its audio's id.
    """

    model: str
    wants_text: bool = True
    audio_format: str | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    has_media: bool = False
    audio_lifetime_s: int = 0
    id: str = dataclasses.field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def audio_id(self) -> str:
        return self.id.replace("chatcmpl-", "audio-")

    @property
    def expires_at(self) -> int:
        return self.created + self.audio_lifetime_s

    def envelope(self, kind: str, **rest: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **rest}

    def usage(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """OpenAI's usage of the end event's ``counts``; a codec frame is an audio token."""
        prompt, text, audio = counts["prompt_tokens"], counts["text_tokens"], counts["audio_frames"]
        details = (
            {"cached_tokens": 0} if self.has_media else {"text_tokens": prompt, "audio_tokens": 0, "cached_tokens": 0}
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": text + audio,
            "total_tokens": prompt + text + audio,
            "prompt_tokens_details": counts.get("prompt_tokens_details", details),
            "completion_tokens_details": {"text_tokens": text, "audio_tokens": audio, "reasoning_tokens": 0},
        }


async def whole(pieces: AsyncGenerator[Delta, None], shape: Shape) -> bytes:
    """The answer as one chat.completion, JSON."""
    text: list[str] = []
    pcm: list[bytes] = []
    end: Mapping[str, Any] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            text.append(piece.text)
            pcm.append(piece.audio)
            end = piece.event or end
    said = "".join(text)
    message: dict[str, Any] = {"role": "assistant", "content": said if shape.wants_text else None, "refusal": None}
    if shape.audio_format is not None:
        message["audio"] = {
            "id": shape.audio_id,
            "data": await _file(shape.audio_format, b"".join(pcm)),
            "transcript": said,
            "expires_at": shape.expires_at,
        }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end["finish_reason"]}
    return orjson.dumps(shape.envelope("chat.completion", choices=[choice], usage=shape.usage(end["usage"])))


async def _file(audio_format: str, pcm: bytes) -> str:
    """Base64 of the whole file."""
    writer = FORMATS[audio_format]
    content = await asyncio.to_thread(writer.whole, pcm) if writer.compressed else writer.whole(pcm)
    return base64_text(content)


class ChunkWriter(Protocol):
    """Turns the pieces of one answer into the events of its stream. ``compresses``: ``take`` belongs on a thread."""

    @property
    def compresses(self) -> bool: ...
    def opening(self) -> list[bytes]: ...
    def take(self, piece: Delta) -> list[bytes]: ...


async def server_sent_events(
    first: Delta, rest: AsyncIterator[Delta], stream: ChunkWriter, reword: Reword
) -> AsyncGenerator[bytes, None]:
    """The answer as chat.completion.chunk events. An error becomes an event of its own, and the last before [DONE]."""
    try:
        for chunk in (*stream.opening(), *stream.take(first)):
            yield chunk
        async for piece in rest:
            on_thread = stream.compresses and (piece.audio or piece.event)
            for chunk in await asyncio.to_thread(stream.take, piece) if on_thread else stream.take(piece):
                yield chunk
    except Exception as error:
        _, body = errors.describe(reword(error) if isinstance(error, OmniError) else error)
        yield event(body)
    yield b"data: [DONE]\n\n"


class Chunks:
    """OpenAI's."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._audio = AudioStream(shape.audio_format) if shape.audio_format is not None else None
        self._audio_id: dict[str, str] = {"id": shape.audio_id}  # empty once it has been told
        self._counts = {"prompt_tokens": 0, "text_tokens": 0, "audio_frames": 0}
        self._samples = 0

    @property
    def compresses(self) -> bool:
        return self._audio is not None and self._audio.compressed

    def opening(self) -> list[bytes]:
        return [self._chunk({"role": "assistant", "content": "" if self._shape.wants_text else None, "refusal": None})]

    def _chunk(self, delta: dict[str, Any], modality: str = "text", finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        body = self._shape.envelope("chat.completion.chunk", choices=[choice], modality=modality)
        if self._shape.continuous_usage:
            body["usage"] = self._shape.usage(self._counts)
        elif self._shape.include_usage:
            body["usage"] = None
        return event(body)

    def _count(self, piece: Delta) -> None:
        self._counts |= piece.event.get("usage", {})
        if piece.audio:
            self._samples += len(piece.audio) // SAMPLE_BYTES
            self._counts["audio_frames"] = math.ceil(self._samples * CODEC_FRAMES_PER_SECOND / SAMPLE_RATE_HZ)

    def take(self, piece: Delta) -> list[bytes]:
        self._count(piece)
        events = []
        if piece.text:
            events.append(self._text(piece.text))
        if piece.audio and self._audio is not None:
            events += self._data(self._audio.encode(piece.audio))
        if piece.event.get("type") == "end":
            events += self._end(piece.event)
        return events

    def _text(self, text: str) -> bytes:
        delta: dict[str, Any] = {"content": text} if self._shape.wants_text else {}
        if self._audio is not None:
            delta["audio"] = self._tagged({"transcript": text})
        return self._chunk(delta)

    def _data(self, data: str) -> list[bytes]:
        return [self._chunk({"audio": self._tagged({"data": data})}, "audio")] if data else []

    def _tagged(self, audio: dict[str, Any]) -> dict[str, Any]:
        tag, self._audio_id = self._audio_id, {}
        return tag | audio

    def _end(self, end: Mapping[str, Any]) -> list[bytes]:
        events = []
        if self._audio is not None:
            events += self._data(self._audio.finish())
            events.append(self._chunk({"audio": self._tagged({"expires_at": self._shape.expires_at})}, "audio"))
        events.append(self._chunk({}, finish_reason=end["finish_reason"]))
        if self._shape.include_usage:
            usage = self._shape.usage(end["usage"])
            events.append(event(self._shape.envelope("chat.completion.chunk", choices=[], usage=usage)))
        return events
