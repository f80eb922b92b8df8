"""Tools, calls and their results: requests that are refused by the path of what is wrong, and answers with calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.pipeline.support import HELLO, IMAGE, MODEL, House
from triton_omni.errors import InvalidRequestError, RequestCancelledError
from triton_omni.pipeline.events import CancelToken
from triton_omni.pipeline.null import NullThinkerConfig
from triton_omni.pipeline.request import RequestParser
from triton_omni.tools import ToolUse, joined

Make = Callable[..., House]


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def call(call_id: str, name: str = "now", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


NOW, WEATHER = tool("now"), tool("weather", description="é", parameters={"type": "object"}, strict=True)


def test_tools_and_who_chooses() -> None:
    parser = RequestParser(MODEL)
    both = [NOW, WEATHER]

    def use(**values: Any) -> ToolUse | None:
        return parser.parse(json.dumps({"messages": HELLO, **values})).tools

    assert use() is None
    assert use(tool_choice="none") is use(tool_choice="auto") is None
    assert use(tools=both) == use(tools=both, tool_choice=None, parallel_tool_calls=None) == ToolUse((NOW, WEATHER))
    assert use(tools=both, tool_choice="auto", parallel_tool_calls=False) == ToolUse((NOW, WEATHER), parallel=False)
    assert use(tools=both, tool_choice="required") == ToolUse((NOW, WEATHER), "required")
    assert use(tools=both, tool_choice=named("weather")) == ToolUse((NOW, WEATHER), "named", "weather")
    assert use(tools=both, tool_choice="none") is None


def test_calls_and_results_in_messages() -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b", "weather", '{"x": 1}')]},
        {"role": "tool", "content": "noon", "tool_call_id": "b"},
        {"role": "user", "content": "And?"},
        {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "a"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call("a")]},
        {"role": "tool", "content": "", "tool_call_id": "a"},
        {"role": "assistant", "content": "Bye.", "tool_calls": None},
    ]
    checked = RequestParser(MODEL).check({"messages": messages}).messages
    assert checked[1] == {**messages[1], "content": ""}
    assert checked[2:-1] == tuple(messages[2:-1])
    assert checked[-1] == {"role": "assistant", "content": "Bye."}
    assert RequestParser(MODEL).check({"messages": checked}).messages == checked
    without_content = {"role": "assistant", "tool_calls": [call("a")]}
    assert RequestParser(MODEL).check({"messages": [*HELLO, without_content]}).messages[1]["content"] == ""


def after(*messages: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, *messages]}


def asked(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def result(call_id: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "x", "tool_call_id": call_id, **more}


def with_tools(*tools: Any, **values: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tools": list(tools), **values}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": HELLO, "tools": {}}, "tools", "non-empty list"),
    (with_tools(), "tools", "non-empty list"),
    (with_tools("now"), "tools[0]", "type and function"),
    (with_tools({"type": "function"}), "tools[0].function", "missing"),
    (with_tools({"type": "search", "function": {}}), "tools[0].type", "'function'"),
    (with_tools({**NOW, "strict": True}), "tools[0].strict", "not known"),
    (with_tools(NOW, {"type": "function", "function": "now"}), "tools[1].function", "name"),
    (with_tools(tool("a b")), "tools[0].function.name", "letters, digits"),
    (with_tools(tool("a" * 65)), "tools[0].function.name", "1 to 64"),
    (with_tools(tool(7)), "tools[0].function.name", "letters, digits"),  # type: ignore[arg-type]
    (with_tools(NOW, WEATHER, NOW), "tools[2].function.name", "once"),
    (with_tools(tool("f", describe="x")), "tools[0].function.describe", "'description'"),
    (with_tools(tool("f", description=7)), "tools[0].function.description", "string"),
    (with_tools(tool("f", description="\ud800")), "tools[0].function.description", "Unicode"),
    (with_tools(tool("f", parameters=[])), "tools[0].function.parameters", "JSON schema"),
    (with_tools(tool("f", parameters={"type": "string"})), "tools[0].function.parameters.type", "'object'"),
    (with_tools(tool("f", parameters={"title": "\ud800"})), "tools[0].function.parameters", "Unicode"),
    (with_tools(tool("f", strict="yes")), "tools[0].function.strict", "true or false"),
    (with_tools(NOW, tool_choice="any"), "tool_choice", '"required"'),
    (with_tools(NOW, tool_choice=["auto"]), "tool_choice", '"required"'),
    (with_tools(NOW, tool_choice={"type": "function"}), "tool_choice.function", "missing"),
    (with_tools(NOW, tool_choice={"type": "tool", "function": {}}), "tool_choice.type", "'function'"),
    (with_tools(NOW, tool_choice=named("then")), "tool_choice.function.name", "now"),
    (with_tools(NOW, parallel_tool_calls="yes"), "parallel_tool_calls", "true or false"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "without tools"),
    ({"messages": HELLO, "parallel_tool_calls": True}, "parallel_tool_calls", "without tools"),
    (after(result("a")), "messages[1].tool_call_id", "there is none"),
    (after({"role": "tool", "content": "x"}), "messages[1].tool_call_id", "missing"),
    (after(asked(call("a")), result("b")), "messages[2].tool_call_id", "'a'"),
    (after(asked(call("a")), result("a"), result("a")), "messages[3].tool_call_id", "there is none"),
    (after(asked(call("a")), result(["a"])), "messages[2].tool_call_id", "'a'"),
    (after(asked(call("a")), result("a", name="now")), "messages[2].name", "not known"),
    (after(asked(call("a")), result("a", content=None)), "messages[2].content", "string or a non-empty list"),
    (after(asked()), "messages[1].tool_calls", "non-empty"),
    (after(asked("a")), "messages[1].tool_calls[0]", "id and type and function"),
    (after(asked(call("a"), call("a"))), "messages[1].tool_calls[1].id", "another"),
    (after(asked(call(7))), "messages[1].tool_calls[0].id", "string"),  # type: ignore[arg-type]
    (after(asked({**call("a"), "type": "tool"})), "messages[1].tool_calls[0].type", "'function'"),
    (after(asked(call("a", arguments={}))), "messages[1].tool_calls[0].function.arguments", "string"),  # type: ignore[arg-type]
    (after(asked(call("a", name=None))), "messages[1].tool_calls[0].function.name", "string"),  # type: ignore[arg-type]
    (after({"role": "user", "content": "x", "tool_calls": [call("a")]}), "messages[1].tool_calls", "not known"),
    (after({"role": "assistant", "content": None}), "messages[1].content", "string or a non-empty list"),
    (after(asked(call("a")), result("a", content=[{"type": "image"}])), "messages[2].content[0].type", "user"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "field", "says"), BAD, ids=[f"{field} {says}" for _, field, says in BAD])
def test_errors_name_the_path(values: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestParser(MODEL).parse(json.dumps(values))
    assert caught.value.field == field
    assert says in caught.value.message


def spoken(omni: House) -> list[int]:
    """All ids that the talker has got."""
    starts = [c[2].token_ids for c in omni.talker.named("start")]
    return np.concatenate([*starts, *(c[2] for c in omni.talker.named("append"))]).tolist() if starts else []


def calls_of(caller: Any) -> list[tuple[str, str, str]]:
    deltas = joined(delta for event in caller.deltas for delta in event.info.get("tool_calls", ()))
    assert [delta["index"] for delta in deltas] == list(range(len(deltas)))
    return [(d["id"], d["function"]["name"], d["function"]["arguments"]) for d in deltas]


@pytest.mark.parametrize("async_chunk", [True, False])
def test_text_is_spoken_and_the_calls_behind_it_are_not(house: Make, async_chunk: bool) -> None:
    omni, plain = house(), house()
    caller = omni.submit(tools=[NOW, WEATHER], async_chunk=async_chunk).wait()
    same = plain.submit(async_chunk=async_chunk).wait()
    assert calls_of(caller) == [("call_0", "now", '{"n": 0}'), ("call_1", "weather", '{"n": 1}')]
    assert caller.text == same.text
    assert np.array_equal(caller.audio, same.audio) and caller.audio.size
    assert spoken(omni) == spoken(plain) == list(range(1000, 1040))
    assert caller.info["finish_reason"] == "tool_calls"
    assert caller.info["usage"] == same.info["usage"] | {"text_tokens": 46, "completion_tokens": 46 + 149}


@pytest.mark.parametrize("media", [(), (b"png",)])
def test_an_answer_of_nothing_but_calls_has_no_samples(house: Make, media: tuple[bytes, ...]) -> None:
    omni = house()
    caller = omni.submit(media=media, tools=[NOW, WEATHER], tool_choice=named("weather")).wait()
    assert calls_of(caller) == [("call_0", "weather", '{"n": 0}')]
    assert (caller.text, caller.audio.size, spoken(omni)) == ("", 0, [])
    assert not omni.code2wav.calls
    assert caller.info["finish_reason"] == "tool_calls"
    assert caller.info["usage"] == {
        "prompt_tokens": 32,
        "completion_tokens": 3,
        "text_tokens": 3,
        "audio_frames": 0,
        "audio_samples": 0,
    }
    omni.wait_empty()  # the rows of a media prompt too


def test_a_call_that_is_cut_ends_with_length(house: Make) -> None:
    caller = house().submit(modalities=["text"], tools=[NOW], tool_choice="required", thinker={"max_tokens": 2}).wait()
    assert calls_of(caller) == [("call_0", "now", '{"n": ')]
    assert caller.info["finish_reason"] == "length"


def test_one_call_where_no_more_are_wanted_and_none_where_none_is(house: Make) -> None:
    omni = house()
    one = omni.submit(modalities=["text"], tools=[NOW, WEATHER], parallel_tool_calls=False).wait()
    none = omni.submit(modalities=["text"], tools=[NOW, WEATHER], tool_choice="none").wait()
    assert [name for _, name, _ in calls_of(one)] == ["now"]
    assert calls_of(none) == [] and none.info["finish_reason"] == "stop"
    assert omni.thinker.named("generate")[1][1].tools is None


def test_calls_count_in_continuous_usage_and_in_logprobs(house: Make) -> None:
    request = {"tools": [NOW], "tool_choice": "required", "continuous_usage": True, "thinker": {"logprobs": 0}}
    caller = house().submit(modalities=["text"], **request).wait()
    deltas = [e.info for e in caller.deltas if e.info.get("tool_calls")]
    assert deltas[-1]["usage"] == {"text_tokens": 3}
    assert sum(len(info["logprobs"]) for info in deltas) == 3


def test_cancel_in_the_middle_of_a_call_gives_everything_back(house: Make) -> None:
    omni = house(thinker=NullThinkerConfig(token_ms=20, prefill_ms=1, answer_tokens=2))
    token = CancelToken()
    many = [tool(f"f{i}") for i in range(100)]
    caller = omni.submit(token=token, media=(b"png",), messages=IMAGE, tools=many)
    caller.wait_for(lambda c: any("tool_calls" in e.info for e in c.deltas))
    token.cancel()
    caller.wait()
    assert isinstance(caller.error, RequestCancelledError)
    omni.wait_empty()


def test_deltas_of_one_call_join() -> None:
    begin = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": piece}} for piece in ("{", "}")]
    other = {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    assert joined([begin, *more, other]) == ({**begin, "function": {"name": "f", "arguments": "{}"}}, other)
    assert joined(more) == ({"index": 0, "function": {"arguments": "{}"}},)
    assert joined([]) == ()
