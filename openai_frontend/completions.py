"""omni_bls's pieces of an answer as OpenAI's chat completions; ``chunks.py`` has their streams.

Where text and speech are both asked for, text is in ``content`` (as for text alone) and also in ``audio.transcript``
(where OpenAI's audio models have it). Without text among the modalities ``content`` is null and the transcript alone
carries it. Calls of tools are never spoken: an answer of nothing else has neither ``content`` nor ``audio``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import orjson

from openai_frontend import errors
from openai_frontend.audio import FORMATS, base64_text
from openai_frontend.engine import Delta
from openai_frontend.events import event
from triton_omni.errors import OmniError

Reword = Callable[[OmniError], OmniError]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What the client asked its answer to look like. ``audio_format``: None without speech. ``continuous_usage``: each
    chunk carries the usage so far. ``audio_lifetime_s``: how long the answer can be named by its audio's id.
    """

    model: str
    choices: int = 1
    wants_text: bool = True
    wants_logprobs: bool = False
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


class ToolCalls:
    """The calls of one answer, from their deltas."""

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []

    def add(self, deltas: Sequence[Mapping[str, Any]]) -> None:
        """The first delta of a call brings its id and its function's name; later ones more of the arguments."""
        for delta in deltas:
            function = delta["function"]
            if delta["index"] == len(self.whole):
                named = {"name": function["name"], "arguments": ""}
                self.whole.append({"id": delta["id"], "type": "function", "function": named})
            self.whole[delta["index"]]["function"]["arguments"] += function.get("arguments", "")


class _Choice:
    """One answer as it comes in."""

    def __init__(self) -> None:
        self.end: Mapping[str, Any] = {}
        self._text: list[str] = []
        self._pcm: list[bytes] = []
        self._logprobs: list[Any] = []
        self._calls = ToolCalls()

    def take(self, piece: Delta) -> None:
        self._text.append(piece.text)
        self._pcm.append(piece.audio)
        if piece.event:
            self._logprobs += piece.event.get("logprobs", ())
            self._calls.add(piece.event.get("tool_calls", ()))
            self.end = piece.event

    async def json(self, index: int, shape: Shape) -> dict[str, Any]:
        said, pcm, calls = "".join(self._text), b"".join(self._pcm), self._calls.whole
        only_calls = bool(calls) and not said
        content = said if shape.wants_text and not only_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if shape.audio_format is not None and not only_calls:
            message["audio"] = {
                "id": shape.audio_id,
                "data": await _file(shape.audio_format, pcm),
                "transcript": said,
                "expires_at": shape.expires_at,
            }
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs(self._logprobs) if shape.wants_logprobs else None,
            "finish_reason": self.end["finish_reason"],
        }


async def whole(pieces: AsyncGenerator[Delta, None], shape: Shape) -> bytes:
    """The answer as one chat.completion, JSON."""
    choices = [_Choice() for _ in range(shape.choices)]
    async with aclosing(pieces):
        async for piece in pieces:
            choices[piece.choice].take(piece)
    told = [await choice.json(index, shape) for index, choice in enumerate(choices)]
    usage = shape.usage(total([choice.end["usage"] for choice in choices]))
    return orjson.dumps(shape.envelope("chat.completion", choices=told, usage=usage))


def logprobs(tokens: Sequence[Any]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}


def total(counts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The counts of all choices together; they share one prompt."""
    if len(counts) == 1:
        return counts[0]
    return {**counts[0], **{name: sum(each[name] for each in counts) for name in ("text_tokens", "audio_frames")}}


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
        yield b"".join([*stream.opening(), *stream.take(first)])
        async for piece in rest:
            on_thread = stream.compresses and (piece.audio or piece.event)
            chunks = await asyncio.to_thread(stream.take, piece) if on_thread else stream.take(piece)
            if chunks:  # in one write: each crosses all the middleware
                yield b"".join(chunks)
    except Exception as error:
        _, body = errors.describe(reword(error) if isinstance(error, OmniError) else error)
        yield event(body)
    yield b"data: [DONE]\n\n"
