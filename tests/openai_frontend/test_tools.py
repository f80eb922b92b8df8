"""Tools, tool messages and formats: what reaches omni_bls, and what comes back."""

from __future__ import annotations

import pytest

from openai_frontend.engine import Delta
from tests.openai_frontend.answers import CLOCK, OSLO, PARIS, TEXT_AND_CALL, TWO_CALLS, WEATHER
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of, events_of

pytestmark = pytest.mark.asyncio
URL = "/v1/chat/completions"
CALL = {"id": "call_a", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
OTHER_CALL = {"id": "call_b", "type": "function", "function": {"name": "get_weather", "arguments": OSLO}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
PCM = bytes(range(200))


async def wire_of(make_app, body):
    engine = FakeEngine(START, END)
    async with client_of(make_app(engine)) as client:
        response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return engine.request


async def answer_of(make_app, body, script):
    async with client_of(make_app(FakeEngine(*script))) as client:
        response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


async def stream_of(make_app, body, script):
    async with client_of(make_app(FakeEngine(*script))) as client:
        return events_of(await client.post(URL, json=body | {"stream": True}))


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_tools_reach_the_model(make_app, chat, choice):
    wire = await wire_of(make_app, chat(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False))
    assert wire["tools"] == [WEATHER, CLOCK]
    assert (wire["tool_choice"], wire["parallel_tool_calls"]) == (choice, False)


async def test_some_of_the_tools(make_app, chat):
    allowed = {"mode": "required", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    wire = await wire_of(make_app, chat(tools=[WEATHER, CLOCK], tool_choice=choice))
    assert (wire["tools"], wire["tool_choice"]) == ([CLOCK], "required")


async def test_an_error_in_one_of_some_tools_names_its_place(make_app, chat):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    wrong = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "array"}}}
    async with client_of(make_app(FakeEngine(START, END))) as client:
        response = await client.post(URL, json=chat(tools=[WEATHER, wrong], tool_choice=choice))
    assert response.json()["error"]["param"] == "tools[1].function.parameters.type"


async def test_no_tools_are_nothing_to_tell(make_app, chat):
    plain = await wire_of(make_app, chat())
    for changes in ({"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "auto"}):
        wire = await wire_of(make_app, chat(**changes))
        assert wire | {"request_id": ""} == plain | {"request_id": ""}


async def test_calls_and_outputs_go_back(make_app, chat):
    messages = [
        {"role": "user", "content": "Paris and Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}, OTHER_CALL]},
        {"role": "tool", "tool_call_id": "call_a", "content": "Sun"},
        {"role": "tool", "tool_call_id": "call_b", "content": [{"type": "text", "text": t} for t in ("Sn", "ow")]},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_a", "content": ""},
    ]
    wire = await wire_of(make_app, chat(messages=messages, tools=[WEATHER]))
    assert wire["messages"] == [
        {"role": "user", "content": "Paris and Oslo?"},
        {"role": "assistant", "tool_calls": [CALL, OTHER_CALL]},
        {"role": "tool", "tool_call_id": "call_a", "content": "Sun"},
        {"role": "tool", "tool_call_id": "call_b", "content": "Snow"},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_a", "content": ""},
    ]


async def test_a_schema_and_its_description(make_app, chat):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    named = {"name": "point", "schema": schema, "strict": True}
    asked = {"type": "json_schema", "json_schema": named | {"description": "Where it is."}}
    wire = await wire_of(make_app, chat(response_format=asked))
    assert wire["thinker"] == {"response_format": {"type": "json_schema", "json_schema": named}}
    said = {"role": "system", "content": "Answer with JSON of point: Where it is."}
    assert wire["messages"] == [{"role": "user", "content": "Hello"}, said]


@pytest.mark.parametrize(("asked", "told"), [({"type": "json_object"}, True), ({"type": "text"}, False)])
async def test_other_formats(make_app, chat, asked, told):
    wire = await wire_of(make_app, chat(response_format=asked))
    assert wire.get("thinker") == ({"response_format": asked} if told else None)


async def test_calls_in_a_whole_answer(make_app, chat):
    choice = await answer_of(make_app, chat(tools=[WEATHER]), TWO_CALLS)
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL, OTHER_CALL]}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}


async def test_text_before_a_call(make_app, chat):
    message = (await answer_of(make_app, chat(tools=[WEATHER]), TEXT_AND_CALL))["message"]
    assert (message["content"], message["tool_calls"]) == ("Let me look.", [CALL])


async def test_calls_in_a_stream(make_app, chat):
    events = await stream_of(make_app, chat(tools=[WEATHER]), TWO_CALLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert [delta["tool_calls"] for delta in deltas[1:-1]] == [
        [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "get_weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"place": '}}],
        [{"index": 0, "function": {"arguments": '"Paris"}'}}],
        [{"index": 1, "id": "call_b", "type": "function", "function": {"name": "get_weather", "arguments": ""}}],
        [{"index": 1, "function": {"arguments": OSLO}}],
    ]
    assert (deltas[-1], events[-1]["choices"][0]["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]])
async def test_calls_are_not_spoken(make_app, chat, modalities):
    body = chat(tools=[WEATHER], modalities=modalities, audio={"format": "wav"})
    choice = await answer_of(make_app, body, TWO_CALLS)
    assert "audio" not in choice["message"]
    assert choice["message"]["content"] is None
    events = await stream_of(make_app, body, TWO_CALLS)
    assert all("audio" not in event["choices"][0]["delta"] for event in events)


async def test_what_is_said_beside_a_call_is_spoken(make_app, chat):
    body = chat(tools=[WEATHER], modalities=["text", "audio"])
    script = (*TEXT_AND_CALL[:-1], Delta(audio=PCM), TEXT_AND_CALL[-1])
    message = (await answer_of(make_app, body, script))["message"]
    assert (message["content"], message["audio"]["transcript"]) == ("Let me look.", "Let me look.")
    assert message["tool_calls"] == [CALL]
    deltas = [event["choices"][0]["delta"] for event in await stream_of(make_app, body, script)]
    assert any(delta.get("audio", {}).get("data") for delta in deltas)
    assert any("expires_at" in delta.get("audio", {}) for delta in deltas)


async def test_calls_in_vllm_omnis_dialect(make_app, chat):
    body = chat(tools=[WEATHER], logprobs=True, audio={"dialect": "vllm-omni"})
    events = await stream_of(make_app, body, (*TWO_CALLS[:2], Delta(event={"logprobs": []}), TWO_CALLS[-1]))
    assert [delta["tool_calls"][0]["id"] for e in events if "tool_calls" in (delta := e["choices"][0]["delta"])] == [
        "call_a"
    ]
    assert {"content": [], "refusal": None} in [event["choices"][0]["logprobs"] for event in events]
