"""What request bodies are made of. Unknown keys and wrong types are errors; parameters of OpenAI's that this server
does not have may be sent with the value that asks for nothing, and are refused by name otherwise.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from triton_omni.options import unknown_key_message


class Strict(BaseModel):
    """Nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, dict) and _is_of_another_type(values.get("type"), cls.model_fields.get("type")):
            return values  # which is what to tell of it, not that such a thing has keys of its own
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for key in values if isinstance(values, dict) else ():
            if key not in known:
                key = key.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair breaks pydantic's errors
                message = unknown_key_message(key, known)
                raise PydanticCustomError("unknown_parameter", "{message}", {"key": key, "message": message})
        return values


def _is_of_another_type(given: Any, field: FieldInfo | None) -> bool:
    if given is None or field is None or get_origin(field.annotation) is not Literal:
        return False
    return given not in get_args(field.annotation)


class Only:
    """A parameter that may be there but must not ask for anything: null, or one of ``neutral``. ``instead``: what to do
    rather.
    """

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        self.neutral = neutral
        self.instead = instead

    def check(self, value: Any) -> Any:
        if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in self.neutral):
            return value
        allowed = "".join(f" or send {json.dumps(neutral)}" for neutral in self.neutral)
        message = f"is not supported; {self.instead or f'leave it out{allowed}'}"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}


def _valid_unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("bad_unicode", "must be valid Unicode; it holds half of a surrogate pair") from None
    return value


def _can_be_sent(value: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(value)
    except TypeError as error:
        message = f"must be JSON of valid Unicode, 64-bit integers and at most 254 levels: {error}"
        raise PydanticCustomError("bad_json", "{message}", {"message": message}) from None
    return value


Text: TypeAlias = Annotated[str, AfterValidator(_valid_unicode)]
Int: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# A JSON object as it is.
JsonObject: TypeAlias = Annotated[dict[str, Any], AfterValidator(_can_be_sent)]
