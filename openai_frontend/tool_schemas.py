"""Functions that the model may call, the calls it made, and the shape its text must have. What JSON Schema is
understood is the runtime's matter.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from openai_frontend.strict import Int, JsonObject, Strict, Text

Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    """``parameters``: JSON Schema of an object; absent, the function takes none."""

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Text


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "a mode"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "one function", "allowed_tools": "some functions"}.get(kind) if isinstance(kind, str) else None


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")]
    | Annotated[NamedTool, Tag("one function")]
    | Annotated[AllowedToolsChoice, Tag("some functions")],
    Discriminator(
        _choice,
        custom_error_type="tool_choice",
        custom_error_message=(
            'must be "none", "auto", "required", an object with type "function" that names one, '
            'or one with type "allowed_tools"'
        ),
    ),
]


class CalledFunction(Strict):
    """``arguments``: JSON text as the model wrote it. ``parsed_arguments``: what the SDK has read in them."""

    name: Annotated[Text, Field(min_length=1)]
    arguments: Text
    parsed_arguments: Any = None


class ToolCall(Strict):
    """A call of a former answer. ``index``: its place among that answer's, as streams have it."""

    id: Annotated[Text, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction
    index: Int | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """``description``: read by the model, behind the conversation; the schema itself only bounds what it can say."""

    name: Name
    description: Text | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")]
