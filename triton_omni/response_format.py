"""OpenAI's ``response_format``: what an answer as a whole must look like.

    {"type": "text"}                                                              anything (the default)
    {"type": "json_object"}                                                       some JSON object
    {"type": "json_schema", "json_schema": {"name", "schema", "description", "strict"}}   JSON that fits the schema

The answer is held to the schema while it is generated, whatever ``strict`` says. Here only the frame and the schema's
size are checked; what a schema may hold is the engine's to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any

from triton_omni.errors import InvalidRequestError
from triton_omni.options import unknown_key_message

TYPES = ("text", "json_object", "json_schema")
MAX_SCHEMA_CHARS = 120_000
MAX_SCHEMA_DEPTH = 64  # objects and lists within one another
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_JSON_SCHEMA_KEYS = ("name", "schema", "description", "strict")


def check_response_format(value: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequestError naming the field, from ``response_format`` on."""
    if value is None:
        return
    field = "response_format"
    kind = value.get("type")
    if kind not in TYPES:
        raise InvalidRequestError(f"{field}.type", f"must be one of {', '.join(TYPES)}, got {short(kind)}")
    _check_keys(value, field, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_schema":
        _check_json_schema(value.get("json_schema"), f"{field}.json_schema")


def check_schema(schema: Any, field: str) -> None:
    """The size of a JSON schema. Raises InvalidRequestError naming ``field``."""
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(field, f"must be a JSON schema, an object; got {short(schema)}")
    if not _within_depth(schema):
        raise InvalidRequestError(field, f"must be nested at most {MAX_SCHEMA_DEPTH} deep")
    chars = len(json.dumps(schema, ensure_ascii=False))
    if chars > MAX_SCHEMA_CHARS:
        raise InvalidRequestError(field, f"must be at most {MAX_SCHEMA_CHARS} characters of JSON, got {chars}")


def _check_json_schema(value: Any, field: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field, f"must be an object with name and schema, got {short(value)}")
    _check_keys(value, field, _JSON_SCHEMA_KEYS)
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{field}.name", f"must be 1 to 64 letters, digits, _ or -, got {short(name)}")
    if not isinstance(value.get("strict"), (bool, type(None))):
        raise InvalidRequestError(f"{field}.strict", f"must be true or false, got {short(value['strict'])}")
    if not isinstance(value.get("description"), (str, type(None))):
        raise InvalidRequestError(f"{field}.description", f"must be a string, got {short(value['description'])}")
    if "schema" not in value:
        raise InvalidRequestError(f"{field}.schema", "is missing; give a JSON schema")
    check_schema(value["schema"], f"{field}.schema")


def _check_keys(value: Mapping[str, Any], field: str, keys: tuple[str, ...]) -> None:
    for key in value:
        if key not in keys:
            raise InvalidRequestError(f"{field}.{key}", unknown_key_message(str(key), keys))


def _within_depth(schema: Mapping[str, Any]) -> bool:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for each in level for item in _items(each) if isinstance(item, (Mapping, list, tuple))]
        if not level:
            return True
    return False


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container
