"""Tool calls read from an answer: the same however it is cut, and as vLLM's own parser reads them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from typing import Any

import numpy as np
import pytest

from triton_omni.thinker.tool_calls import Span, ToolCallParser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz", "days": [1, {"x": null}]}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@dataclasses.dataclass
class Read:
    """What a caller has of an answer once all deltas are joined."""

    text: str = ""
    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    said: list[bool] = dataclasses.field(default_factory=list)  # one per character of the answer


def read(parts: list[str], **options: Any) -> Read:
    parser, result = ToolCallParser(**options), Read()
    ids = []
    for span in [*itertools.chain.from_iterable(map(parser.push, parts)), *parser.finish()]:
        assert span.text == "" or (len(span.text) == span.num_chars and span.call is None)
        result.text += span.text
        result.said += [bool(span.text)] * span.num_chars
        if span.call is None:
            continue
        index, function = span.call["index"], span.call["function"]
        if index == len(result.calls):
            assert set(span.call) == {"index", "id", "type", "function"} and span.call["type"] == "function"
            ids.append(span.call["id"])
            result.calls.append((function["name"], function["arguments"]))
        else:
            assert set(span.call) == {"index", "function"} and set(function) == {"arguments"}
            assert index == len(result.calls) - 1
            result.calls[index] = (result.calls[index][0], result.calls[index][1] + function["arguments"])
    assert len(set(ids)) == len(ids) == parser.num_calls
    assert len(result.said) == len("".join(parts))
    return result


ANSWERS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Just text, 1 < 2, <tool", "Just text, 1 < 2, <tool", []),
    ("It ends. \n", "It ends. \n", []),
    (WEATHER, "", [("weather", '{"city": "Graz", "days": [1, {"x": null}]}')]),
    (f"Let me see.\n{NOW}", "Let me see.", [("now", "{}")]),
    (f"{WEATHER}\n{NOW}\n", "", [("weather", '{"city": "Graz", "days": [1, {"x": null}]}'), ("now", "{}")]),
    (f"{NOW}{NOW}", "", [("now", "{}"), ("now", "{}")]),
    (f"One.\n{NOW}\nTwo. {NOW} Three.\n", "One.\nTwo. Three.", [("now", "{}"), ("now", "{}")]),
    ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "", [("f", '{"a":1}')]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n}\n</tool_call>!', "!", [("f", '{"a": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> }\\"\\\\"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call> }\\"\\\\"}')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "a\n<b"}}</tool_call>', "", [("f", '{"a": "a\n<b"}')]),
    ('<tool_call>{"name": "é", "arguments": {"a": "日本"}}</tool_call>', "", [("é", '{"a": "日本"}')]),
    # In another order, with more in it, without an end.
    ('<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>', "", [("f", '{"name": "x"}')]),
    ('<tool_call>{"id": 1, "name": "a\\u0062", "arguments": {}}</tool_call>', "", [("ab", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>.', ".", [("f", "{}")]),
    (f'<tool_call>{{"name": "f", "arguments": {{}}\n</tool_call>{NOW}', "", [("f", "{}"), ("now", "{}")]),
    (f'<tool_call>{{"name": "f", "arguments": {{}}, {NOW}', "", [("f", "{}"), ("now", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}\nDone.', "\nDone.", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    # Arguments that are no JSON end with the call.
    (f'<tool_call>{{"name": "f", "arguments": {{"a": 1</tool_call>{NOW}', "", [("f", '{"a": 1'), ("now", "{}")]),
    (f'<tool_call>{{"name": "f", "arguments": {{"a": "b}}\n</tool_call>{NOW}', "", [("f", '{"a": "b}'), ("now", "{}")]),
    # No calls.
    ("<tool_call>\nI would\n</tool_call>", "<tool_call>\nI would\n</tool_call>", []),
    (f"Say <tool_call> like {NOW}", "Say <tool_call> like", [("now", "{}")]),
    ('A\n<tool_call>{"name": "f"}</tool_call> b', 'A\n<tool_call>{"name": "f"}</tool_call> b', []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": "f\\q", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("<tool_call>", "<tool_call>", []),
    ("</tool_call>", "</tool_call>", []),
]  # fmt: skip
ANSWERS = [(answer, answer if text is None else text, calls) for answer, text, calls in ANSWERS]


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS, ids=[repr(a[0])[:60] for a in ANSWERS])
def test_every_cut_gives_the_same(answer: str, text: str, calls: list[tuple[str, str]]) -> None:
    whole = read([answer])
    assert (whole.text, whole.calls) == (text, calls)
    for a in range(len(answer) + 1):
        assert read([answer[:a], answer[a:]]) == whole, answer[:a]
    assert read(list(answer)) == whole
    for size in (2, 3, 5, 7, 11):
        assert read([answer[i : i + size] for i in range(0, len(answer), size)]) == whole


def test_short_pieces_everywhere() -> None:
    answer = f'See:\n<tool_call>{{"name": "f", "arguments": {{"a": "{{"}}}}</tool_call>\n{NOW} So.'
    whole = read([answer])
    for a, size in itertools.product(range(len(answer)), range(1, 13)):
        assert read([answer[:a], answer[a : a + size], answer[a + size :]]) == whole


def test_text_before_a_call_does_not_wait_and_arguments_stream() -> None:
    parser = ToolCallParser(new_id=lambda: "call_1")
    assert parser.push("Let me ") == [Span(6, "Let me")]
    assert parser.push("see.\n<tool") == [Span(5, " see.")]
    assert parser.push('_call>\n{"name": "f", "argu') == []
    head = len('\n<tool_call>\n{"name": "f", "arguments": ')
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert parser.push('ments": {"a": ') == [Span(head, call=first), _more('{"a": ')]
    assert parser.push('"b c') == [_more('"b c')]
    assert parser.push('"}') == [_more('"}')]
    assert parser.push("}\n</tool_call>") == [Span(len("}\n</tool_call>"))]
    assert parser.finish() == []


def _more(arguments: str) -> Span:
    return Span(len(arguments), call={"index": 0, "function": {"arguments": arguments}})


@pytest.mark.parametrize("begun", ["<tool_call>", '\n<tool_call>\n{"name": "f", "argum', '<tool_call>{"x": 1}'])
def test_a_call_that_has_just_begun_where_the_answer_is_cut_is_not_said(begun: str) -> None:
    parser = ToolCallParser()
    spans = [*parser.push(f"See.{begun}"), *parser.finish(cut=True)]
    assert "".join(span.text for span in spans) == "See."
    assert not parser.num_calls and sum(span.num_chars for span in spans) == len(f"See.{begun}")
    parser = ToolCallParser()
    whole = [*parser.push('<tool_call>{"arguments": {}, "name": "f"}'), *parser.finish(cut=True)]
    assert parser.num_calls == 1 and whole[0].call is not None


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_one_call_at_most(size: int) -> None:
    answer = f"See.\n{WEATHER}\n{NOW} So."
    parser = ToolCallParser(parallel=False)
    for at in range(0, len(answer), size):
        parser.push(answer[at : at + size])
        assert parser.done == (at + size >= answer.index("}}\n") + 1)
        if parser.done:
            break
    result = read([answer], parallel=False)
    assert result.text == "See." and [name for name, _ in result.calls] == ["weather"]


def test_a_call_in_another_order_can_be_the_only_one_too() -> None:
    result = read([f'<tool_call>{{"arguments": {{}}, "name": "f"}}</tool_call>{NOW}'], parallel=False)
    assert result.calls == [("f", "{}")]


@pytest.fixture(scope="module")
def hermes() -> Any:
    """vLLM's parser of the same form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("vllm.tool_parsers.hermes_tool_parser", exc_type=ImportError).Hermes2ProToolParser


def vllm_read(hermes: Any, answer: str) -> tuple[str, list[tuple[str, Any]]]:
    """(content, [(name, arguments)]) of the whole answer at once, as vLLM's server gives it without streaming."""
    told = hermes(object()).extract_tool_calls(answer, request=None)
    return told.content or "", [(call.function.name, json.loads(call.function.arguments)) for call in told.tool_calls]


def vllm_stream(hermes: Any, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser, content, calls, before = hermes(object()), "", [], ""
    for part in parts:
        delta = parser.extract_tool_calls_streaming(before, before + part, part, [], [], [], None)
        before += part
        content += (delta and delta.content) or ""
        for call in delta.tool_calls if delta else []:
            if call.function.name:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.vllm
def test_as_vllm_reads_it(hermes: Any) -> None:
    """Random answers of text and calls, whole and in pieces; vLLM gives the white space before the first call too."""
    rng = np.random.default_rng(3)
    values = [1, -2.5, True, None, "", "a b", "日本 é", '"}{', "\n\\", [1, [2]], {"name": "x"}, {}]
    for _ in range(150):
        text, calls = str(rng.choice(["", "Well.", "a < b"])), []
        for _ in range(rng.integers(0, 4)):
            arguments = {f"k{i}": values[rng.integers(len(values))] for i in range(rng.integers(0, 4))}
            dumped = json.dumps(arguments, ensure_ascii=bool(rng.integers(2)), indent=int(rng.integers(3)) or None)
            calls.append(f'<tool_call>\n{{"name": "f{rng.integers(9)}", "arguments": {dumped}}}\n</tool_call>')
        answer = "\n".join(filter(None, [text, *calls]))
        size = int(rng.integers(1, 9))
        parts = [answer[i : i + size] for i in range(0, len(answer), size)]
        ours = read(parts)
        assert len(ours.calls) == len(calls)
        for content, told in (vllm_read(hermes, answer), vllm_stream(hermes, parts)):
            assert ours.text == (content.rstrip() if calls else content)
            assert [(name, json.loads(arguments)) for name, arguments in ours.calls] == told


@pytest.mark.vllm
def test_malformed_calls_are_text_as_with_vllm(hermes: Any) -> None:
    """But for two that vLLM takes: arguments that are no object, a name that cannot be sent."""
    malformed = [a for a, _, calls in ANSWERS if not calls and "[1]" not in a and "\\ud800" not in a]
    assert len(malformed) >= 9
    for answer in malformed:
        assert vllm_read(hermes, answer) == (answer, [])
        assert read([answer]).text == answer
