"""The functions that a request lets the model call: OpenAI's ``tools``, ``tool_choice``, ``parallel_tool_calls``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any, Literal, TypeAlias

from triton_omni.errors import InvalidRequestError
from triton_omni.options import unknown_key_message
from triton_omni.response_format import check_schema

TOOL_KEYS = ("tools", "tool_choice", "parallel_tool_calls")
ToolCallDelta: TypeAlias = Mapping[str, Any]
"""OpenAI's ``delta.tool_calls`` entry: {"index", "id", "type", "function": {"name", "arguments"}} begins a call, and
{"index", "function": {"arguments"}} is a further piece of its arguments."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools``: OpenAI's list as the client sent it, which is also what the model's chat template takes.

    ``choice`` "auto" leaves calls to the model; "required" asks for at least one call, "named" for one of ``function``,
    and then the answer is nothing else. ``parallel`` False: at most one call. There is no "none": a request that
    chooses it has no ToolUse, so the model never hears of the tools and nothing in its answer is taken for a call.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "required", "named"] = "auto"
    function: str = ""
    parallel: bool = True

    def to_wire(self) -> dict[str, Any]:
        """The three keys that ``check_tools`` reads."""
        named = {"type": "function", "function": {"name": self.function}}
        return {
            "tools": list(self.tools),
            "tool_choice": named if self.choice == "named" else self.choice,
            "parallel_tool_calls": self.parallel,
        }


def check_tools(request: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a request with the keys ``TOOL_KEYS``; null stands for an absent key.

    Raises: InvalidRequestError naming the path of what is wrong (``tools[0].function.name``).
    """
    tools, choice, parallel = (request.get(key) for key in TOOL_KEYS)
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", f"must be 'none' or 'auto' without tools, got {short(choice)}")
        if parallel is not None:
            raise InvalidRequestError("parallel_tool_calls", "must be left out without tools")
        return None
    names = _check_names(tools)
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequestError("parallel_tool_calls", f"must be true or false, got {short(parallel)}")
    use = ToolUse(tuple(tools), parallel=parallel is not False)
    if choice is None or choice == "auto":
        return use
    if choice == "required":
        return dataclasses.replace(use, choice="required")
    if isinstance(choice, Mapping):
        return dataclasses.replace(use, choice="named", function=_check_named(choice, names))
    if choice == "none":
        return None
    raise InvalidRequestError("tool_choice", f"must be {_CHOICES}, got {short(choice)}")


def _check_names(tools: Any) -> list[str]:
    if not isinstance(tools, (list, tuple)) or not tools:
        raise InvalidRequestError("tools", f"must be a non-empty list of functions, got {short(tools)}")
    names: list[str] = []
    for i, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{i}]")
        if name in names:
            raise InvalidRequestError(f"tools[{i}].function.name", f"must be given once, got {name!r} twice")
        names.append(name)
    return names


def joined(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """The same calls in as few deltas as can be, one per call."""
    whole: list[ToolCallDelta] = []
    for delta in deltas:
        if whole and whole[-1]["index"] == delta["index"]:
            function = whole[-1]["function"]
            arguments = function["arguments"] + delta["function"]["arguments"]
            whole[-1] = {**whole[-1], "function": {**function, "arguments": arguments}}
        else:
            whole.append(delta)
    return tuple(whole)


def _check_tool(tool: Any, where: str) -> str:
    """The function's name."""
    check_keys(tool, where, ("type", "function"))
    if tool["type"] != "function":
        raise InvalidRequestError(f"{where}.type", f"must be 'function', got {short(tool['type'])}")
    function, where = tool["function"], f"{where}.function"
    check_keys(function, where, ("name",), ("description", "parameters", "strict"))
    name = function["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        accepted = "1 to 64 letters, digits, underscores and dashes"
        raise InvalidRequestError(f"{where}.name", f"must be {accepted}, got {short(name)}")
    if function.get("description") is not None:
        check_text(function["description"], f"{where}.description")
    parameters = function.get("parameters")
    if parameters is not None:
        check_schema(parameters, f"{where}.parameters")
        check_text(json.dumps(parameters, ensure_ascii=False), f"{where}.parameters")
        if parameters.get("type", "object") != "object":
            given = short(parameters["type"])
            raise InvalidRequestError(f"{where}.parameters.type", f"must be 'object', which arguments are, got {given}")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise InvalidRequestError(f"{where}.strict", f"must be true or false, got {short(function['strict'])}")
    return name


def _check_named(choice: Mapping[str, Any], names: list[str]) -> str:
    check_keys(choice, "tool_choice", ("type", "function"))
    if choice["type"] != "function":
        raise InvalidRequestError("tool_choice.type", f"must be 'function', got {short(choice['type'])}")
    check_keys(choice["function"], "tool_choice.function", ("name",))
    name = choice["function"]["name"]
    if name not in names:
        raise InvalidRequestError(
            "tool_choice.function.name", f"must be one of the tools ({', '.join(names)}), got {short(name)}"
        )
    return str(name)


def check_keys(value: Any, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raises InvalidRequestError unless ``value`` is an object with the required keys and no unknown ones."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, f"must be an object with {' and '.join(required)}, got {short(value)}")
    for key in value:
        if key not in required + optional:
            raise InvalidRequestError(f"{where}.{key}", unknown_key_message(str(key), required + optional))
    for key in required:
        if key not in value:
            raise InvalidRequestError(f"{where}.{key}", "is missing")


def check_text(value: Any, where: str) -> str:
    """Raises InvalidRequestError unless ``value`` is a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidRequestError(where, f"must be a string, got {short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(where, "must be valid Unicode; it holds half of a surrogate pair") from None
    return value
