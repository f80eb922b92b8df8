"""Answers of a fake engine that call tools and tell log probabilities."""

from __future__ import annotations

import math
from typing import Any

from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import START, USAGE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
CALLED = Delta(event={"type": "end", "finish_reason": "tool_calls", "usage": USAGE})


def call(index: int, call_id: str, name: str, *arguments: str) -> list[Delta]:
    """The pieces of one call."""
    begun = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [Delta(event={"tool_calls": [delta]}) for delta in (begun, *rest)]


def tokens(*texts: str) -> list[dict[str, Any]]:
    """Log probabilities of tokens; each has one alternative."""

    def told(text: str, probability: float) -> dict[str, Any]:
        return {"token": text, "bytes": list(text.encode()), "logprob": math.log(probability)}

    return [told(text, 0.75) | {"top_logprobs": [told(text, 0.75), told("?", 0.25)]} for text in texts]


PARIS, OSLO = '{"place": "Paris"}', '{"place": "Oslo"}'
TWO_CALLS = (
    START,
    *call(0, "call_a", "get_weather", '{"place": ', '"Paris"}'),
    *call(1, "call_b", "get_weather", OSLO),
    CALLED,
)
TEXT_AND_CALL = (START, Delta(text="Let me look."), *call(0, "call_a", "get_weather", PARIS), CALLED)
