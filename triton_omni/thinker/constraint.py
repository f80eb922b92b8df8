"""What an answer as a whole must match, whichever field of the request asks for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Literal

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import ThinkerRequest
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.tool_calls import ToolCallParser
from triton_omni.thinker.tool_grammar import tool_grammar
from triton_omni.tools import ToolUse

CHOICE = "tool_choice"


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """``text``: a JSON schema as JSON, or a grammar in llguidance's Lark (which takes schemas as ``%json {…}``).

    ``asked_by``: the field that asks for it; ``field``: the one that holds what is in ``text``. Both are for errors.
    """

    kind: Literal["json", "lark"]
    text: str
    asked_by: str
    field: str

    def too_costly(self, answer: str) -> InvalidRequestError:
        """It has outgrown llguidance's limits behind ``answer``."""
        told = f"became too costly after {len(answer)} characters of the answer; give a simpler one"
        return InvalidRequestError(self.field, told)

    def check_whole(self, answer: str, calls: ToolCallParser | None, sampling: ThinkerSampling) -> None:
        """For an answer that says "stop": a grammar that has outgrown its limits may end it as its end would, with any
        half of it. Raises InvalidRequestError.
        """
        if sampling.stop_token_ids:
            return
        if calls is not None and (calls.inside or (self.asked_by == CHOICE and not calls.num_calls)):
            raise self.too_costly(answer)
        if self.kind != "json" or sampling.stop:
            return
        try:
            json.loads(answer)
        except ValueError:
            raise self.too_costly(answer) from None


def constraint_of(request: ThinkerRequest, tag_ids: Mapping[str, int]) -> Constraint | None:
    """None: the answer is free. ``tag_ids``: see ``tool_grammar``."""
    whole = _response_format(request)
    if request.tools is None:
        return whole
    grammar = tool_grammar(request.tools, tag_ids, whole.text if whole is not None else None)
    if grammar is None:
        return None
    if request.tools.choice != "auto":
        asked_by = CHOICE
    else:
        asked_by = whole.asked_by if whole is not None else _strict(request.tools)
    return Constraint("lark", grammar, asked_by, _place(request.tools))


def check_unconstrained(request: ThinkerRequest) -> None:
    """For engines that sample freely. Raises InvalidRequestError."""
    constraint = constraint_of(request, {})
    if constraint is not None:
        told = (
            "needs the thinker's engine vllm; this thinker runs on transformers, which does not hold answers to a form"
        )
        raise InvalidRequestError(constraint.asked_by, told)


def _strict(tools: ToolUse) -> str:
    first = next(i for i, tool in enumerate(tools.tools) if tool["function"].get("strict"))
    return f"tools[{first}].function.strict"


def _place(tools: ToolUse) -> str:
    """Where the schemas are that a grammar of calls holds."""
    names = [tool["function"]["name"] for tool in tools.tools]
    if tools.choice == "named":
        return f"tools[{names.index(tools.function)}].function.parameters"
    return "tools" if len(names) > 1 else "tools[0].function.parameters"


def _response_format(request: ThinkerRequest) -> Constraint | None:
    wanted = request.sampling.response_format or {"type": "text"}
    if wanted["type"] == "text":
        return None
    asked_by = "response_format.type"
    if wanted["type"] == "json_object":
        return Constraint("json", '{"type": "object"}', asked_by, asked_by)
    schema = json.dumps(wanted["json_schema"]["schema"], ensure_ascii=False)
    return Constraint("json", schema, asked_by, "response_format.json_schema.schema")
