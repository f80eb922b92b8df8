"""Tool calls through a real tritonserver: streamed beside text, never spoken, and answered in the next turn."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.triton.client import HELLO, Answer, TritonCall, omni, open_sessions, speech
from triton_omni.serve.tritonserver import TritonServer
from triton_omni.tools import joined

pytestmark = pytest.mark.triton

TOKENS = 40  # the null thinker's text
CITY = {"type": "object", "properties": {"city": {"enum": ["Graz", "Wien"]}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}, "strict": False},
}
NOW = {"type": "function", "function": {"name": "now"}}


def calls(answer: Answer) -> list[dict[str, Any]]:
    return [dict(delta) for delta in joined(d for _, _, event in answer.parts for d in event.get("tool_calls", ()))]


def test_text_is_spoken_and_calls_are_not(null_server: TritonServer) -> None:
    plain = Answer(omni(null_server, speech()))
    answer = Answer(omni(null_server, speech(tools=[WEATHER, NOW])))
    assert [c["function"] for c in calls(answer)] == [
        {"name": "weather", "arguments": '{"n": 0}'},
        {"name": "now", "arguments": '{"n": 1}'},
    ]
    assert answer.text == plain.text
    assert np.array_equal(answer.audio, plain.audio) and plain.audio.size
    assert answer.end["finish_reason"] == "tool_calls"
    assert answer.end["usage"]["text_tokens"] == TOKENS + 6
    assert answer.end["usage"]["audio_frames"] == plain.end["usage"]["audio_frames"]


def test_an_answer_of_nothing_but_calls_has_no_sound(null_server: TritonServer, eventually: Any) -> None:
    answer = Answer(omni(null_server, speech(tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)))
    assert [c["function"]["name"] for c in calls(answer)] == ["weather"]
    assert (answer.text, answer.audio.size, answer.end["finish_reason"]) == ("", 0, "tool_calls")
    eventually(lambda: open_sessions(null_server))


def test_the_thinker_alone_keeps_calls_from_text(null_server: TritonServer) -> None:
    request = json.dumps({"messages": HELLO, "tools": [NOW], "tool_choice": "required"})
    _, *parts = TritonCall(null_server, "thinker", {"REQUEST": [request]})
    assert sum(part["TOKEN_IDS"].size for part in parts) == 0
    assert sum(part["CALL_TOKEN_IDS"].size for part in parts if "CALL_TOKEN_IDS" in part) == 3
    told = [delta for part in parts if "TOOL_CALLS" in part for delta in json.loads(part["TOOL_CALLS"].item())]
    assert [delta["function"] for delta in joined(told)] == [{"name": "now", "arguments": '{"n": 0}'}]


def test_cancelled_in_the_middle_of_a_call(tight_server: TritonServer, eventually: Any) -> None:
    many = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(2000)]  # a minute of calls
    call = omni(tight_server, speech(tools=many, tool_choice="required"))
    responses = iter(call)
    while b"tool_calls" not in next(responses)["EVENT"].item():
        pass
    call.cancel()
    eventually(lambda: open_sessions(tight_server))


def test_bad_tools_are_refused_by_their_path(null_server: TritonServer) -> None:
    bad = {"type": "function", "function": {"name": "no spaces"}}
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[tools\[1\]\.function\.name\]"):
        Answer(omni(null_server, speech(tools=[NOW, bad])))


def test_a_function_is_called_and_its_result_is_spoken_of(
    demo_server: TritonServer, request: pytest.FixtureRequest, eventually: Any
) -> None:
    question = {"role": "user", "content": "What is the weather in Graz?"}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": None}}  # type: ignore[dict-item]
    asked = speech(
        messages=[question],
        tools=[NOW, strict],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
    )
    if request.node.callspec.params["demo_server"] == "transformers":
        with pytest.raises(InferenceServerException, match=r"^invalid_request \[tool_choice\].*vllm"):
            Answer(omni(demo_server, asked))
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Graz"}'}}
    else:
        first = Answer(omni(demo_server, asked))
        (call,) = calls(first)
        assert call.pop("index") == 0 and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Graz", "Wien")
        assert (first.text, first.audio.size, first.end["finish_reason"]) == ("", 0, "tool_calls")
        assert first.end["usage"]["audio_frames"] == 0 < first.end["usage"]["text_tokens"]
    messages = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": call["id"]},
    ]
    few = {"thinker": {"max_tokens": 8}, "talker": {"max_frames": 8}}
    second = Answer(omni(demo_server, speech(messages=messages, tools=[NOW, WEATHER], **few)))
    assert second.text and second.audio.size
    assert not calls(second)
    eventually(lambda: open_sessions(demo_server))
