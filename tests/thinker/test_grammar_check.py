"""Good grammars pass, bad ones are named, hostile ones cost two seconds at most and leave the checker working."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from triton_omni.errors import InvalidRequestError, StageError
from triton_omni.thinker.constraint import Constraint

pytest.importorskip("llguidance")
pytestmark = pytest.mark.vllm

from triton_omni.thinker import grammar_check  # noqa: E402
from triton_omni.thinker.grammar_check import GrammarChecker  # noqa: E402

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}
CALL = f'start: "<tool_call>\\n" body "\\n</tool_call>"\nbody: %json {json.dumps(PERSON)}'


def json_schema(schema: Any) -> Constraint:
    return Constraint("json", json.dumps(schema), "response_format.type", "response_format.json_schema.schema")


@pytest.fixture(scope="module")
def checker(tokenizer: Any) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer, len(tokenizer))
    yield checker
    checker.close()


GOOD = {
    "an object": json_schema(PERSON),
    "anything": json_schema({}),
    "with notes": json_schema(
        {
            **PERSON,
            "title": "Person",
            "description": "who",
            "$schema": "http://json-schema.org/draft-07/schema#",
            "default": 1,
        }
    ),
    "recursion": json_schema(TREE),
    "alternatives": json_schema({"anyOf": [PERSON, {"type": "null"}, {"enum": ["a", 1, None]}]}),
    "a pattern": json_schema({"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]+)?$", "maxLength": 20}),
    "a format": json_schema({"type": "string", "format": "date-time"}),
    "a list": json_schema({"type": "array", "items": PERSON, "minItems": 1, "maxItems": 100}),
    "a grammar": Constraint("lark", CALL, "tool_choice", "tools"),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_serves_passes(checker: GrammarChecker, name: str) -> None:
    checker.check(GOOD[name])


BAD = {
    "type": ({"type": "strnig"}, "strnig"),
    "keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "format": ({"type": "string", "format": "nope"}, "nope"),
    "pattern": ({"type": "string", "pattern": "("}, "regex"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "reference": ({"$ref": "#/$defs/missing"}, "missing"),
    "remote reference": ({"$ref": "http://example.org/x.json"}, "example.org"),
    "nothing fits": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "nsatisfiable"),
    "itself": ({"$ref": "#"}, ""),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_is_named(checker: GrammarChecker, name: str) -> None:
    schema, says = BAD[name]
    with pytest.raises(InvalidRequestError, match="cannot be used: ") as caught:
        checker.check(json_schema(schema))
    assert caught.value.field == "response_format.json_schema.schema"
    assert says in caught.value.message
    assert len(caught.value.to_wire()) < 500


HOSTILE = {
    "a long list": {"type": "array", "items": {"type": "string"}, "minItems": 10**8},
    "many lists": {"prefixItems": [{"type": "array", "minItems": 10_000 - i} for i in range(500)], "type": "array"},
    "all of any of": {
        "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": k}}} for k in (1, 2)]} for i in range(20)]
    },
    "thousands of keys": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}},
    "a long pattern": {"type": "string", "pattern": "^a{1000000000}$"},
    "a pattern and a length": {"type": "string", "pattern": "^(a|aa)+$", "minLength": 5000, "maxLength": 10000},
    "a multiple": {"type": "integer", "multipleOf": 982451653},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_and_the_next_is_served(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checker.check(json_schema(HOSTILE[name]))
    assert caught.value.field == "response_format.json_schema.schema"
    checker.check(json_schema(PERSON))


def test_a_check_that_hangs_is_refused_and_the_next_is_served(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(json_schema(PERSON))
    hanging = checker._process
    assert hanging is not None
    hanging.send_signal(signal.SIGSTOP)
    os.waitpid(hanging.pid, os.WUNTRACED)  # until it has stopped
    with monkeypatch.context() as patch, pytest.raises(InvalidRequestError, match="s to prepare") as caught:
        patch.setattr(grammar_check, "WALL_S", 0.1)
        checker.check(json_schema(PERSON))
    assert caught.value.field == "response_format.json_schema.schema"
    assert hanging.returncode == -signal.SIGKILL
    checker.check(json_schema(PERSON))


def test_a_closed_checker_fails(tokenizer: Any) -> None:
    checker = GrammarChecker(tokenizer, len(tokenizer))
    checker.check(json_schema(PERSON))
    checker.close()
    with pytest.raises(StageError, match="shutting down"):
        checker.check(json_schema(PERSON))
