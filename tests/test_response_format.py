from __future__ import annotations

from typing import Any

import pytest

from triton_omni.errors import InvalidRequestError
from triton_omni.response_format import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, check_response_format


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


GOOD = [
    None,
    {"type": "text"},
    {"type": "json_object"},
    named({}),
    named({"type": "object"}, strict=True, description="a thing"),
    named({"type": "object"}, strict=None, description=None),
    named(nested(MAX_SCHEMA_DEPTH)),
]


@pytest.mark.parametrize("value", GOOD)
def test_openai_formats(value: Any) -> None:
    check_response_format(value)


BAD = [
    ({}, "response_format.type", "text, json_object, json_schema"),
    ({"type": ["text"]}, "response_format.type", "text, json_object, json_schema"),
    ({"type": "text", "json_schema": {}}, "response_format.json_schema", "not known"),
    ({"type": "json_schema"}, "response_format.json_schema", "name and schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name", "letters"),
    ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name", "let"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema", "missing"),
    (named(True), "response_format.json_schema.schema", "object"),
    (named({}, strict="yes"), "response_format.json_schema.strict", "true or false"),
    (named({}, description=1), "response_format.json_schema.description", "string"),
    (named({}, schemas={}), "response_format.json_schema.schemas", "did you mean 'schema'"),
    (named(nested(MAX_SCHEMA_DEPTH + 1)), "response_format.json_schema.schema", "nested at most 64"),
    (named({"not": [[[[nested(MAX_SCHEMA_DEPTH)]]]]}), "response_format.json_schema.schema", "nested at most 64"),
    (named({"const": "x" * MAX_SCHEMA_CHARS}), "response_format.json_schema.schema", "at most 120000 characters"),
]


@pytest.mark.parametrize(("value", "field", "says"), BAD)
def test_errors_name_the_field_and_what_is_accepted(value: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_response_format(value)
    assert caught.value.field == field
    assert says in caught.value.message
    assert len(caught.value.to_wire()) < 500
