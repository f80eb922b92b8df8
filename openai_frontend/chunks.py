"""omni_bls's pieces of an answer as OpenAI's chat.completion.chunk events.

A stream is: a delta with the role of each choice; deltas of text, of calls and of audio as they come (the first with
``audio`` brings ``audio.id``); with speech, one with ``audio.expires_at``; one with ``finish_reason`` for each choice;
on request one with ``usage`` and no choices; ``[DONE]``. Text fields of all deltas may be joined as they are, base64
included: they equal the whole answer's, only that where that has no content they may have an empty one. A chunk's extra
``modality`` tells text from audio without looking inside. Until ``expires_at`` a later request may name the answer by
its ``audio.id``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from openai_frontend.audio import SAMPLE_BYTES, AudioStream
from openai_frontend.completions import Shape, logprobs, total
from openai_frontend.engine import Delta
from openai_frontend.events import event
from triton_omni.model_config import CODEC_FRAMES_PER_SECOND, SAMPLE_RATE_HZ


class _Choice:
    """How far one choice has come."""

    def __init__(self, shape: Shape, index: int) -> None:
        self.index = index
        self.audio = AudioStream(shape.audio_format) if shape.audio_format is not None else None
        self.audio_id: dict[str, str] = {"id": shape.audio_id}  # empty once it has been told
        self.counts: dict[str, Any] = {"prompt_tokens": 0, "text_tokens": 0, "audio_frames": 0}
        self.has_text = self.has_calls = self.ended = False
        self._samples = 0

    @property
    def only_calls(self) -> bool:
        return self.has_calls and not self.has_text

    def take(self, piece: Delta) -> None:
        self.has_text = self.has_text or bool(piece.text)
        if piece.event:
            self.counts |= piece.event.get("usage", {})
            self.has_calls = self.has_calls or bool(piece.event.get("tool_calls"))
            self.ended = piece.event.get("type") == "end"
        if piece.audio:
            self._samples += len(piece.audio) // SAMPLE_BYTES
            self.counts["audio_frames"] = math.ceil(self._samples * CODEC_FRAMES_PER_SECOND / SAMPLE_RATE_HZ)


class Chunks:
    """Turns pieces into the events of one stream."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        # What all chunks begin with, without the brace that would end it.
        self._head = b"data: " + orjson.dumps(shape.envelope("chat.completion.chunk")).removesuffix(b"}")
        self._choices = [_Choice(shape, index) for index in range(shape.choices)]

    @property
    def compresses(self) -> bool:
        audio = self._choices[0].audio
        return audio is not None and audio.compressed

    def opening(self) -> list[bytes]:
        delta = {"role": "assistant", "content": "" if self._shape.wants_text else None, "refusal": None}
        return [self._chunk(choice, orjson.dumps(delta)) for choice in self._choices]

    def take(self, piece: Delta) -> list[bytes]:
        choice = self._choices[piece.choice]
        choice.take(piece)
        events = self._told(choice, piece)
        if piece.audio and choice.audio is not None:
            events += self._data(choice, choice.audio.encode(piece.audio))
        if choice.ended:
            events += self._end(choice, piece.event)
        return events

    def _chunk(
        self,
        choice: _Choice,
        *delta: bytes,
        modality: bytes = b"text",
        finish_reason: str | None = None,
        tokens: Any = None,
    ) -> bytes:
        """``delta``: parts of its JSON. They are joined once, with what all chunks have: a second of sound is 64 kB."""
        begin = b',"choices":[{"index":%d,"delta":' % choice.index
        rest = orjson.dumps({"logprobs": tokens, "finish_reason": finish_reason}).removeprefix(b"{")
        parts = [self._head, begin, *delta, b",", rest, b'],"modality":"', modality]
        if self._shape.continuous_usage:
            parts += [b'","usage":', orjson.dumps(self._usage()), b"}\n\n"]
        else:
            parts.append(b'","usage":null}\n\n' if self._shape.include_usage else b'"}\n\n')
        return b"".join(parts)

    def _usage(self) -> dict[str, Any]:
        return self._shape.usage(total([choice.counts for choice in self._choices]))

    def _told(self, choice: _Choice, piece: Delta) -> list[bytes]:
        """Text and calls; the piece's log probabilities go with what comes first."""
        deltas = [self._text(choice, piece.text)] if piece.text else []
        tokens = None
        if piece.event:
            if calls := piece.event.get("tool_calls"):
                deltas.append({"tool_calls": calls})
            if "logprobs" in piece.event:
                tokens = logprobs(piece.event["logprobs"])
                deltas = deltas or [{}]
        told = enumerate(map(orjson.dumps, deltas))
        return [self._chunk(choice, delta, tokens=None if place else tokens) for place, delta in told]

    def _text(self, choice: _Choice, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if self._shape.wants_text else {}
        if choice.audio is not None:
            delta["audio"] = self._tag(choice) | {"transcript": text}
        return delta

    def _data(self, choice: _Choice, data: bytes) -> list[bytes]:
        if not data:
            return []
        tag = b"".join(b'"%b":"%b",' % (name.encode(), value.encode()) for name, value in self._tag(choice).items())
        return [self._chunk(choice, b'{"audio":{', tag, b'"data":"', data, b'"}}', modality=b"audio")]

    def _tag(self, choice: _Choice) -> dict[str, str]:
        tag, choice.audio_id = choice.audio_id, {}
        return tag

    def _end(self, choice: _Choice, end: Mapping[str, Any]) -> list[bytes]:
        events = []
        if choice.audio is not None and not choice.only_calls:
            events += self._data(choice, choice.audio.finish())
            expiry = {"audio": self._tag(choice) | {"expires_at": self._shape.expires_at}}
            events.append(self._chunk(choice, orjson.dumps(expiry), modality=b"audio"))
        events.append(self._chunk(choice, b"{}", finish_reason=end["finish_reason"]))
        if self._shape.include_usage and all(each.ended for each in self._choices):
            events.append(event(self._shape.envelope("chat.completion.chunk", choices=[], usage=self._usage())))
        return events
