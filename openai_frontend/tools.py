"""Tools, calls of them, and the shape of text, in omni_bls's own JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai_frontend.tool_schemas import (
    AllowedToolsChoice,
    Function,
    JsonSchemaFormat,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from triton_omni.errors import InvalidRequestError


def tools_wire(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None, *, place: str = ""
) -> dict[str, Any]:
    """The keys of REQUEST that tell of tools. ``place`` goes before fields in errors.

    Raises: InvalidRequestError for a choice among tools that are not there.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError(f"{place}tool_choice", 'must be "none" or "auto" without tools')
        return {"parallel_tool_calls": parallel}
    wire: dict[str, Any] = {"tools": [_tool(tool.function) for tool in tools], "tool_choice": choice}
    if isinstance(choice, NamedTool):
        wire["tool_choice"] = choice.model_dump()
    elif isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        wire["tools"] = [_tool(tool.function) for tool in _among(tools, allowed.tools, place)]
        wire["tool_choice"] = allowed.mode
    return wire | {"parallel_tool_calls": parallel}


def moved_tools(wire: Mapping[str, Any], tools: Sequence[Tool] | None) -> dict[str, str]:
    """Where the client put each of the wire's tools, by their names in errors."""
    names = [tool.function.name for tool in tools or ()]
    places = enumerate(names.index(tool["function"]["name"]) for tool in wire.get("tools", ()))
    return {f"tools[{there}]": f"tools[{here}]" for there, here in places if there != here}


def _among(tools: Sequence[Tool], allowed: Sequence[NamedTool], place: str) -> list[Tool]:
    names = {tool.function.name for tool in tools}
    for index, tool in enumerate(allowed):
        if tool.function.name not in names:
            raise InvalidRequestError(
                f"{place}tool_choice.allowed_tools.tools[{index}].function.name",
                f"must be one of the tools ({', '.join(sorted(names))}), got {tool.function.name[:64]!r}",
            )
    wanted = {tool.function.name for tool in allowed}
    return [tool for tool in tools if tool.function.name in wanted]


def _tool(function: Function) -> dict[str, Any]:
    return {"type": "function", "function": function.model_dump(exclude_none=True)}


def call_wire(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def format_wire(shape: ResponseFormat | None) -> dict[str, Any] | None:
    """None where any text will do."""
    if isinstance(shape, JsonSchemaFormat):
        schema = shape.json_schema.model_dump(by_alias=True, exclude={"description"}, exclude_none=True)
        return {"type": shape.type, "json_schema": schema}
    return None if shape is None or shape.type == "text" else {"type": shape.type}


def format_note(shape: ResponseFormat | None) -> list[dict[str, Any]]:
    """What the model must be told of the format, as messages behind the conversation's."""
    if not isinstance(shape, JsonSchemaFormat) or not shape.json_schema.description:
        return []
    schema = shape.json_schema
    return [{"role": "system", "content": f"Answer with JSON of {schema.name}: {schema.description}"}]
