"""Function calls in a session, behind the ``openai`` client and with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from openai_frontend.engine import Delta
from openai_frontend.realtime.conversation import FunctionCall, FunctionOutput, Item, Part, messages
from tests.openai_frontend.answers import CALLED, OSLO, PARIS, TEXT_AND_CALL, TWO_CALLS, WEATHER, call
from tests.openai_frontend.fakes import END, START, FakeEngine
from tests.openai_frontend.realtime.talk import Talk, served, talk_with
from triton_omni.errors import InvalidRequestError

pytestmark = pytest.mark.asyncio
MakeApp = Callable[..., FastAPI]
TOOL = {"type": "function", **WEATHER["function"]}
CLOCK = {"type": "function", "name": "get_time"}
SUN = (START, Delta("It is sunny."), END)


def script(engine: FakeEngine, *steps: Any) -> None:
    engine.script = steps


async def answer_with(talk: Talk, call_id: str, output: str) -> None:
    item = {"type": "function_call_output", "call_id": call_id, "output": output}
    await talk.send("conversation.item.create", item=item)


async def test_a_call_its_output_and_the_answer_to_that(make_app: MakeApp):
    engine = FakeEngine(START, *call(0, "call_a", "get_weather", '{"place": ', '"Paris"}'), CALLED)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        session = await talk.update(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False)
        assert (session.tools[0].name, session.tool_choice) == ("get_weather", "auto")
        await talk.write("How is Paris?")
        response = (await talk.until("response.done")).response
        assert (response.status, response.output[0].type) == ("completed", "function_call")
        assert talk.types[4:] == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        (added,) = talk.of("response.output_item.added")
        assert (added.item.status, added.item.arguments, added.output_index) == ("in_progress", "", 0)
        deltas = talk.of("response.function_call_arguments.delta")
        (done,) = talk.of("response.function_call_arguments.done")
        assert "".join(delta.delta for delta in deltas) == done.arguments == PARIS
        assert {event.item_id for event in (*deltas, done)} == {added.item.id}
        assert (done.name, done.call_id) == ("get_weather", "call_a")
        (item,) = response.output
        assert (item.name, item.arguments, item.call_id, item.status) == ("get_weather", PARIS, "call_a", "completed")
        assert engine.request["tools"] == [WEATHER]
        assert engine.request["parallel_tool_calls"] is False
        script(engine, *SUN)
        await answer_with(talk, "call_a", "Sun")
        await talk.send("response.create")
        response = (await talk.until("response.done")).response
        assert response.output[0].content[0].transcript == "It is sunny."
    assert engine.request["messages"][1:] == [
        {"role": "assistant", "tool_calls": [call_of("call_a", PARIS)]},
        {"role": "tool", "tool_call_id": "call_a", "content": "Sun"},
    ]


def call_of(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


async def test_two_calls_in_one_answer(make_app: MakeApp):
    engine = FakeEngine(*TWO_CALLS)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(tools=[TOOL], output_modalities=["text"])
        await talk.write("Paris and Oslo?")
        response = (await talk.until("response.done")).response
        assert [(item.call_id, item.arguments) for item in response.output] == [("call_a", PARIS), ("call_b", OSLO)]
        dones = talk.of("response.function_call_arguments.done")
        assert [(done.output_index, done.item_id) for done in dones] == [
            (index, item.id) for index, item in enumerate(response.output)
        ]
        script(engine, *SUN)
        for call_id in ("call_b", "call_a"):
            await answer_with(talk, call_id, call_id)
        await talk.send("response.create")
        await talk.until("response.done")
    _, calls, *outputs = engine.request["messages"]
    assert calls == {"role": "assistant", "tool_calls": [call_of("call_a", PARIS), call_of("call_b", OSLO)]}
    assert [output["tool_call_id"] for output in outputs] == ["call_b", "call_a"]


async def test_speech_before_a_call(make_app: MakeApp):
    engine = FakeEngine(*TEXT_AND_CALL[:-1], Delta(audio=bytes(960)), CALLED)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(tools=[TOOL])
        await talk.write("How is Paris?")
        response = (await talk.until("response.done")).response
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.output[0].content[0].transcript == "Let me look."
        assert len(talk.sound()) == 960
        (audio,) = talk.of("response.output_audio.done")
        (done,) = talk.of("response.function_call_arguments.done")
        assert (audio.output_index, done.output_index) == (0, 1)
        before = [event.previous_item_id for event in talk.of("conversation.item.done")]
        assert before[-2:] == [talk.of("conversation.item.added")[0].item.id, response.output[0].id]


async def test_an_answer_s_own_tools(make_app: MakeApp):
    engine = FakeEngine(*SUN)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(tools=[TOOL])
        choice = {"type": "function", "name": "get_time"}
        await talk.write("The time?", tools=[CLOCK], tool_choice=choice)
        await talk.until("response.done")
        assert engine.request["tools"] == [{"type": "function", "function": {"name": "get_time"}}]
        assert engine.request["tool_choice"] == {"type": "function", "function": {"name": "get_time"}}
        await talk.write("And now?")
        await talk.until("response.done")
        assert (engine.request["tools"], engine.request["tool_choice"]) == ([WEATHER], "auto")
        session = await talk.update(tools=[])
        assert session.tools == []
        await talk.write("And now?")
        await talk.until("response.done")
        assert "tools" not in engine.request


async def test_a_call_that_is_broken_off_is_no_call(make_app: MakeApp):
    engine = FakeEngine(START, *call(0, "call_a", "get_weather", '{"pla'), asyncio.Event(), END)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(tools=[TOOL])
        await talk.write("How is Paris?")
        await engine.waits.wait()
        await talk.send("response.cancel")
        response = (await talk.until("response.done")).response
        assert (response.status, response.output[0].status) == ("cancelled", "incomplete")
        script(engine, *SUN)
        await answer_with(talk, "call_a", "Sun")
        await talk.write("Well?")
        await talk.until("response.done")
    assert [message["role"] for message in engine.request["messages"]] == ["user", "user"]


async def test_what_the_model_refuses_names_its_field(make_app: MakeApp):
    engine = FakeEngine(InvalidRequestError("tools[0].function.strict", "needs vllm"))
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(tools=[TOOL])
        await talk.write("How is Paris?")
        response = (await talk.until("response.done")).response
        assert (response.status, response.status_details.error.type) == ("failed", "invalid_request_error")
        assert response.status_details.error.message == "response.tools[0].strict: needs vllm"


async def test_a_client_brings_a_former_conversation(make_app: MakeApp):
    engine = FakeEngine(*SUN)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        item = {"type": "function_call", "call_id": "mine", "name": "get_weather", "arguments": PARIS}
        await talk.send("conversation.item.create", item=item)
        created = (await talk.until("conversation.item.done")).item
        await answer_with(talk, "mine", "Sun")
        output = (await talk.until("conversation.item.done")).item
        assert (created.call_id, output.output) == ("mine", "Sun")
        await talk.send("conversation.item.retrieve", item_id=created.id)
        assert (await talk.until("conversation.item.retrieved")).item.arguments == PARIS
        await answer_with(talk, "mine", "Rain")
        assert (await talk.until("error")).error.param == "item.call_id"
        await talk.send("conversation.item.truncate", item_id=created.id, content_index=0, audio_end_ms=0)
        assert (await talk.until("error")).error.param == "content_index"
        await talk.send("conversation.item.delete", item_id=created.id)
        await talk.until("conversation.item.deleted")
        await talk.write("Well?")
        await talk.until("response.done")
    assert [message["role"] for message in engine.request["messages"]] == ["user"]


async def test_items_as_messages():
    items = [
        Item("a", "assistant", [Part("output_text", "Let me look.")]),
        FunctionCall("b", "call_a", "get_weather", PARIS),
        FunctionCall("c", "call_b", "get_weather", OSLO, "incomplete"),
        FunctionCall("d", "call_c", "get_weather", OSLO),
        Item("e", "user", [Part("input_text", "Quick!")]),
        FunctionOutput("f", "call_c", "Snow"),
        FunctionOutput("g", "call_b", "?"),
    ]
    told, _ = messages(items, "")
    assert told == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [call_of("call_a", PARIS), call_of("call_c", OSLO)],
        },
        {"role": "user", "content": [{"type": "text", "text": "Quick!"}]},
        {"role": "tool", "tool_call_id": "call_c", "content": "Snow"},
    ]
