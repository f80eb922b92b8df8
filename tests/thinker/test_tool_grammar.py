"""Grammars of answers with calls: what they let through is read as calls that fit the functions' parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from triton_omni.thinker.tool_calls import BEGIN, END, ToolCallParser
from triton_omni.thinker.tool_grammar import tag_ids, tool_grammar
from triton_omni.tools import ToolUse, joined

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

CITY = {"type": "string", "maxLength": 5}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["°C", 'a "quoted" one']}},
}
NOTHING = {"type": "object", "maxProperties": 0}

Matcher = Any


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


WEATHER, NOW = tool("weather", parameters=PARAMETERS), tool("now")


@pytest.fixture(scope="module")
def matcher(tokenizer: Any) -> Callable[..., Matcher]:
    backend = tokenizer.backend_tokenizer.to_str()
    known = llguidance.LLTokenizer(backend, n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)
    tags = tag_ids(tokenizer)
    assert tags == {tag: tokenizer.convert_tokens_to_ids(tag) for tag in (BEGIN, END)}

    def make(use: ToolUse, answer_schema: str | None = None, *, tag_ids: Any = tags) -> Matcher:
        lark = tool_grammar(use, tag_ids, answer_schema)
        assert lark is not None
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        assert not llguidance.LLMatcher.validate_grammar(grammar)  # vLLM asks so too, without a tokenizer
        return llguidance.LLMatcher(known, grammar, log_level=0)

    return make


def accepts(matcher: Matcher, tokenizer: Any, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def called(text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser()
    spans = [*parser.push(text), *parser.finish()]
    deltas = joined(span.call for span in spans if span.call is not None)
    calls = [(delta["function"]["name"], json.loads(delta["function"]["arguments"])) for delta in deltas]
    return "".join(span.text for span in spans), calls


def walk(matcher: Matcher, tokenizer: Any, rng: np.random.Generator) -> str:
    """Some answer that the grammar allows: any allowed token, the end when it may be the end, mostly."""
    ids: list[int] = []
    while not matcher.is_stopped():
        assert len(ids) < 2000
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask[: len(tokenizer)])
        ends = tokenizer.eos_token_id in allowed
        token_id = int(tokenizer.eos_token_id if ends and rng.random() < 0.7 else rng.choice(allowed))
        assert matcher.consume_token(token_id)
        if token_id == tokenizer.eos_token_id:
            break
        ids.append(token_id)
    assert not matcher.is_error()
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("use", [ToolUse((WEATHER, NOW), "required"), ToolUse((NOW, WEATHER), "named", "weather")])
@pytest.mark.parametrize("parallel", [True, False])
def test_whatever_they_let_through_is_calls_that_fit(
    matcher: Callable[..., Matcher], tokenizer: Any, use: ToolUse, parallel: bool
) -> None:
    rng = np.random.default_rng(0)
    numbers = set()
    for _ in range(25):
        answer = walk(matcher(ToolUse(use.tools, use.choice, use.function, parallel)), tokenizer, rng)
        text, calls = called(answer)
        assert text == "" and calls
        numbers.add(len(calls))
        for name, arguments in calls:
            assert name in ([use.function] if use.function else ["weather", "now"])
            jsonschema.validate(arguments, PARAMETERS if name == "weather" else NOTHING)
    assert numbers == {1} if not parallel else numbers > {1}


GRAZ = f'{BEGIN}\n{{"name": "weather", "arguments": {{"city": "Graz", "days": [1]}}}}\n{END}'
NO_DAYS = f'{BEGIN}\n{{"name": "weather", "arguments": {{"city": "Graz"}}}}\n{END}'
NOON = f'{BEGIN}\n{{"name": "now", "arguments": {{}}}}\n{END}'
ZONE = f'{BEGIN}\n{{"name": "now", "arguments": {{"zone": 1}}}}\n{END}'


@pytest.mark.parametrize(
    ("use", "schema", "taken", "refused"),
    [
        (ToolUse((WEATHER, NOW), "required"), None, [GRAZ, f"{NOON}\n{GRAZ}"], ["", "Hi", NO_DAYS, ZONE, f"Hi{GRAZ}"]),
        (ToolUse((WEATHER, NOW), "required", parallel=False), None, [NOON], [f"{NOON}\n{NOON}", f"{NOON}\n"]),
        (ToolUse((WEATHER, NOW), "named", "now"), None, [NOON], [GRAZ, "Hi", ""]),
        (ToolUse((tool("now", strict=False),), "required"), None, [NOON, ZONE], ["Hi"]),
        (
            ToolUse((tool("weather", parameters=PARAMETERS, strict=True), NOW)),
            None,
            ["", "Hi < <tool", f"Hi\n{GRAZ}\n{ZONE} Bye", GRAZ],
            [NO_DAYS, f"{BEGIN} is a tag"],
        ),
        (ToolUse((WEATHER,)), '{"type": "object"}', ['{"a": 1}', NO_DAYS, f"{GRAZ}\n{GRAZ}"], ["Hi", f"{{}}{GRAZ}"]),
    ],
    ids=["required", "one", "named", "not strict", "strict", "or JSON"],
)  # fmt: skip
def test_what_they_take(
    matcher: Callable[..., Matcher],
    tokenizer: Any,
    use: ToolUse,
    schema: str | None,
    taken: list[str],
    refused: list[str],
) -> None:
    for answer in taken:
        assert accepts(matcher(use, schema), tokenizer, answer), answer
    for answer in refused:
        assert not accepts(matcher(use, schema), tokenizer, answer), answer


def test_a_tokenizer_without_tags_spells_them(matcher: Callable[..., Matcher], tokenizer: Any) -> None:
    one = matcher(ToolUse((NOW,), "required"), tag_ids={})
    ids = [i for part in ("<", "tool_call>\n", '{"name": "now", "arguments": {}}\n</', "tool_call>")
           for i in tokenizer.encode(part, add_special_tokens=False)]  # fmt: skip
    assert one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


def test_the_tag_spelled_out_is_no_way_around_a_strict_function(
    matcher: Callable[..., Matcher], tokenizer: Any
) -> None:
    ids = [i for part in ("<tool", "_call>", "{") for i in tokenizer.encode(part, add_special_tokens=False)]
    one = matcher(ToolUse((tool("now", strict=True),)))
    assert one.try_consume_tokens(ids) < len(ids)


def test_without_anything_to_hold_it_to_an_answer_is_free() -> None:
    assert tool_grammar(ToolUse((WEATHER, NOW)), {}, None) is None
