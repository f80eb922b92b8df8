"""Answers in vLLM-Omni's words, so that ``vllm bench serve --omni`` runs against this server.

Its streams differ from OpenAI's: each chunk of speech is a file of its own, header and all, as base64 in
``delta.content``; ``modality`` at the top tells it from text; ``usage`` stands in every chunk and counts text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai_frontend.audio import FORMATS, base64_text
from openai_frontend.completions import Shape, logprobs
from openai_frontend.engine import Delta
from openai_frontend.events import event

DIALECT = "vllm-omni"
# What its bench's data sets add to a request and Qwen3-Omni has no use for, there as here; and what it asks for in case
# the arrivals of text do not tell the time per token, which they do.
IGNORED_FIELDS = ("ref_audio", "ref_text", "task_type", "language", "max_new_tokens", "return_stage_metrics")
_BENCH_REQUEST_ID = "bench-"


def is_bench(headers: Mapping[str, str], *, continuous_usage: bool) -> bool:
    """Whether the bench's omni client asks: it numbers its requests so, and it alone wants usage in every chunk."""
    return continuous_usage and headers.get("x-request-id", "").startswith(_BENCH_REQUEST_ID)


class Chunks:
    """Turns pieces into the events of one stream."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._prompt_tokens = 0
        self._text_tokens = 0

    @property
    def compresses(self) -> bool:
        return self._shape.audio_format is not None and FORMATS[self._shape.audio_format].compressed

    def opening(self) -> list[bytes]:
        return [self._chunk("text", {"role": "assistant", "content": ""})] if self._shape.wants_text else []

    def take(self, piece: Delta) -> list[bytes]:
        usage = piece.event.get("usage", {})
        self._prompt_tokens = usage.get("prompt_tokens", self._prompt_tokens)
        self._text_tokens = usage.get("text_tokens", self._text_tokens)
        events = []
        told: dict[str, Any] = {"content": piece.text} if piece.text and self._shape.wants_text else {}
        if calls := piece.event.get("tool_calls"):
            told["tool_calls"] = calls
        if told or "logprobs" in piece.event:
            events.append(self._chunk("text", told, tokens=piece.event.get("logprobs")))
        if piece.audio and self._shape.audio_format is not None:
            file = base64_text(FORMATS[self._shape.audio_format].whole(piece.audio))
            events.append(self._chunk("audio", {"role": "assistant", "content": file}))
        if piece.event.get("type") == "end":
            last = "text" if self._shape.audio_format is None else "audio"
            events.append(self._chunk(last, {}, piece.event["finish_reason"]))
            if self._shape.include_usage:
                usage = self._usage(self._text_tokens)
                events.append(event(self._shape.envelope("chat.completion.chunk", choices=[], usage=usage)))
        return events

    def _chunk(
        self, modality: str, delta: dict[str, Any], finish_reason: str | None = None, tokens: Any = None
    ) -> bytes:
        told = None if tokens is None else logprobs(tokens)
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish_reason}
        body = self._shape.envelope("chat.completion.chunk", choices=[choice], modality=modality)
        if self._shape.continuous_usage:
            body["usage"] = self._usage(self._text_tokens if modality == "text" else 0)
        return event(body)

    def _usage(self, text_tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": text_tokens, "total_tokens": prompt + text_tokens}
