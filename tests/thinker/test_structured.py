"""Answers held to a form: they fit it, neighbours are what they were, and bad or hostile forms end their request."""

from __future__ import annotations

import json
import re
import threading
from typing import Any
from unittest import mock

import pytest

from tests.thinker.support import TIMEOUT_S, Answered, ask, request, send
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import ThinkerEngine

jsonschema = pytest.importorskip("jsonschema")  # comes with vLLM
pytestmark = pytest.mark.vllm
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "“blue”"]},
        "number": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "certain": {"type": "boolean"},
    },
    "required": ["color", "number", "tags", "certain"],
    "additionalProperties": False,
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SAY = "a color, please"


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def wait_refused(sink: Answered) -> InvalidRequestError:
    error = sink.done().error
    assert isinstance(error, InvalidRequestError)
    assert error.field == "response_format.json_schema.schema"
    return error


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 1}, {"temperature": 2.0, "seed": 2}], ids=str)
def test_answers_fit_the_schema(vllm_engine: ThinkerEngine, options: dict[str, Any]) -> None:
    wanted = schema_format(SCHEMA | COMPACT)
    sink = ask(vllm_engine, request(SAY, response_format=wanted, max_tokens=300, logprobs=2, **options))
    assert sink.finish_reason == "stop"
    jsonschema.validate(json.loads(sink.text), SCHEMA)
    entries = [entry for event in sink.events for entry in event.logprobs]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == sink.text
    assert all(-9999 <= each["logprob"] <= 0 for entry in entries for each in entry["top_logprobs"])


def test_a_json_object(vllm_engine: ThinkerEngine, tokenizer: Any) -> None:
    end = tokenizer.encode("}", add_special_tokens=False)[0]
    wanted = {"type": "json_object"}
    sink = ask(vllm_engine, request(SAY, response_format=wanted, logit_bias={end: 100}, max_tokens=20))
    assert (json.loads(sink.text), sink.finish_reason) == ({}, "stop")


def test_an_answer_that_is_cut_says_so(vllm_engine: ThinkerEngine) -> None:
    sink = ask(vllm_engine, request(SAY, response_format=schema_format(SCHEMA | COMPACT), max_tokens=5))
    assert sink.finish_reason == "length"
    assert '{"color":"red"'.startswith(sink.text[:10])


def test_neighbours_change_nothing(vllm_engine: ThinkerEngine) -> None:
    wanted = [None, schema_format(SCHEMA | COMPACT), schema_format({"enum": ["yes", "no"]}), None, {"type": "text"}]
    hot = {"temperature": 1.0, "max_tokens": 60}
    asked = [{"response_format": each, "seed": i} | hot for i, each in enumerate(wanted)]
    alone = [ask(vllm_engine, request(SAY, **options)) for options in asked]
    together = [send(vllm_engine, request(SAY, **options)) for options in asked]
    for sink, expected in zip(together, alone, strict=True):
        assert (sink.done().ids, sink.text, sink.finish_reason) == (expected.ids, expected.text, expected.finish_reason)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "strnig"}, "strnig"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "^a{1000000000}$"}, "too many|simpler"),  # what a slow machine meets first
    ],
)
def test_what_cannot_be_used_is_named(vllm_engine: ThinkerEngine, schema: Any, says: str) -> None:
    sink = send(vllm_engine, request(SAY, response_format=schema_format(schema)))
    assert re.search(says, wait_refused(sink).message)
    assert not sink.events


def test_a_hostile_schema_holds_nobody_up(vllm_engine: ThinkerEngine) -> None:
    busy, go_on = threading.Event(), threading.Event()
    check = vllm_engine._grammars.check  # type: ignore[attr-defined]

    def held(constraint: Any) -> None:
        busy.set()
        assert go_on.wait(TIMEOUT_S)
        check(constraint)

    hostile = schema_format({"type": "array", "items": {"type": "string"}, "minItems": 10**8})
    with mock.patch.object(vllm_engine._grammars, "check", held):  # type: ignore[attr-defined]
        sink = send(vllm_engine, request("hello", response_format=hostile))
        assert busy.wait(TIMEOUT_S)
        running = send(vllm_engine, request("hello", max_tokens=900, ignore_eos=True))
        running.until(lambda sink: len(sink.ids) > 20)
        assert ask(vllm_engine, request("hello", max_tokens=1)).error is None
        assert not sink.events
        go_on.set()
    assert "simpler" in wait_refused(sink).message
    assert len(running.done().ids) == 900


def test_a_schema_that_becomes_too_costly_on_the_way_fails(vllm_engine: ThinkerEngine) -> None:
    """Not a short answer that says "stop"."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "pattern": "^a{1000000000}$"}},
        "required": ["a", "b"],
    }
    sink = send(vllm_engine, request(SAY, response_format=schema_format(schema | COMPACT), max_tokens=100))
    assert "too costly" in wait_refused(sink).message
    assert '{"a":'.startswith(sink.text[:5])
    assert ask(vllm_engine, request("hello", max_tokens=3, ignore_eos=True)).error is None


def test_an_abort_while_the_grammar_is_judged(vllm_engine: ThinkerEngine) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def held(constraint: Any) -> None:
        busy.set()
        assert go_on.wait(TIMEOUT_S)

    with mock.patch.object(vllm_engine._grammars, "check", held):  # type: ignore[attr-defined]
        asked = request(SAY, response_format={"type": "json_object"})
        sink = send(vllm_engine, asked)
        assert busy.wait(TIMEOUT_S)
        vllm_engine.abort(asked.request_id)
        assert sink.done().finish_reason == "cancelled"
        go_on.set()
