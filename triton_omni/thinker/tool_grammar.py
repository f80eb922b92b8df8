r"""Answers with calls as a grammar in llguidance's Lark, in the form that ``tool_calls`` reads:

    required, named    start: call ("\n" call)*            the first alone where calls are not to be parallel
    auto               start: (TEXT? call)* TEXT?          where a tool is strict
                       start: answer | call ("\n" call)*   where an answer without calls must be JSON

Arguments follow the function's ``parameters``; without them there are none, and with ``strict`` false they are any
object. Beside strict functions, auto holds only the strict ones to their parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from triton_omni.thinker.tool_calls import BEGIN, END
from triton_omni.tools import ToolUse

_TEXT = f"TEXT: /(.|\\n)+/ & ~/(?s:.*){BEGIN}(?s:.*)/"
# As json.dumps writes, and the chat template with it.
_WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tag_ids(tokenizer: Any) -> dict[str, int]:
    """BEGIN and END as tokens, where the tokenizer has them."""
    ids = tokenizer.get_vocab()
    return {tag: ids[tag] for tag in (BEGIN, END) if tag in ids}


def tool_grammar(tools: ToolUse, tag_ids: Mapping[str, int], answer_schema: str | None) -> str | None:
    """None when calls are the model's own affair. ``answer_schema``: JSON of what other answers must match."""
    called = [tool["function"] for tool in tools.tools if tools.choice != "named" or _name(tool) == tools.function]
    calls = 'call ("\\n" call)*' if tools.parallel else "call"
    if tools.choice != "auto":
        start = [f"start: {calls}"]
    elif answer_schema is not None:
        start = [f"start: answer | {calls}", f"answer: %json {answer_schema}"]
    elif any(function.get("strict") for function in called):
        start = ["start: (TEXT? call)* TEXT?", _TEXT]
    else:
        return None
    begin, end = (f"<[{tag_ids[tag]}]>" if tag in tag_ids else json.dumps(tag) for tag in (BEGIN, END))
    options = " | ".join(f"f{i}" for i in range(len(called)))
    rules = [f'call: {begin} "\\n{{\\"name\\": \\"" ({options}) "}}\\n" {end}']
    for i, function in enumerate(called):
        head = json.dumps(f'{function["name"]}", "arguments": ')
        rules.append(f"f{i}: {head} %json {json.dumps(_arguments(function, tools.choice == 'auto'))}")
    return "\n".join([*start, *rules]) + "\n"


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _arguments(function: Mapping[str, Any], only_strict: bool) -> dict[str, Any]:
    schema: Mapping[str, Any]
    if function.get("strict") is False or (only_strict and not function.get("strict")):
        schema = {}
    else:
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return {**schema, "type": "object", "x-guidance": _WHITE_SPACE}
