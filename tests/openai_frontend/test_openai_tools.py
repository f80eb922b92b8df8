"""The ``openai`` client's tools, structured output, log probabilities and choices; the engine plays a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from openai_frontend.engine import Delta
from tests.openai_frontend.answers import CALLED, OSLO, PARIS, TEXT_AND_CALL, TWO_CALLS, call, tokens
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, FakeEngine
from tests.openai_frontend.realtime.talk import served

pytestmark = pytest.mark.asyncio
MakeApp = Callable[..., FastAPI]
QUESTION = {"role": "user", "content": "How is Paris?"}
ASK: dict[str, Any] = {"model": MODEL, "messages": [QUESTION]}
LENGTH = Delta(event={**END.event, "finish_reason": "length"})


class GetWeather(BaseModel):
    """The weather somewhere."""

    place: str = Field(description="A city")


class Answer(BaseModel):
    """What was found."""

    city: str
    degrees: int


WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")
FOUND = Answer(city="Paris", degrees=21)


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


async def with_sync_client(app: FastAPI, work: Callable[[openai.OpenAI], Any]) -> Any:
    """``work`` in a thread: the server runs in this loop."""

    def run(url: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            return work(client)

    async with served(app) as url:
        return await asyncio.to_thread(run, url)


async def test_a_call_its_output_and_the_answer(make_app: MakeApp):
    engine = FakeEngine(*TEXT_AND_CALL)

    def work(client: openai.OpenAI) -> str | None:
        choice = client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="auto").choices[0]
        assert choice.finish_reason == "tool_calls"
        (made,) = choice.message.tool_calls or []
        assert (made.type, made.function.name, made.function.arguments) == ("function", "get_weather", PARIS)
        engine.script = (START, Delta(text="Sunny."), END)
        output = {"role": "tool", "tool_call_id": made.id, "content": "Sun"}
        messages = [QUESTION, choice.message, output]
        return (
            client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0].message.content
        )

    assert await with_sync_client(make_app(engine), work) == "Sunny."
    _, calls, output = engine.request["messages"]
    assert (calls["content"], calls["tool_calls"][0]["function"]["arguments"]) == ("Let me look.", PARIS)
    assert output == {"role": "tool", "tool_call_id": calls["tool_calls"][0]["id"], "content": "Sun"}
    assert engine.request["tools"][0]["function"]["strict"] is True


async def test_streamed_calls_joined_by_hand(make_app: MakeApp):
    async with served(make_app(FakeEngine(*TWO_CALLS))) as url, async_client(url) as client:
        stream = await client.chat.completions.create(**ASK, tools=[WEATHER], stream=True)
        calls: list[dict[str, str]] = []
        reasons = []
        async for chunk in stream:
            for delta in chunk.choices[0].delta.tool_calls or ():
                if delta.id is not None:
                    calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
                calls[delta.index]["arguments"] += delta.function.arguments or ""
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert calls == [
        {"id": "call_a", "name": "get_weather", "arguments": PARIS},
        {"id": "call_b", "name": "get_weather", "arguments": OSLO},
    ]
    assert reasons == ["tool_calls"]


async def test_the_stream_helper_s_calls(make_app: MakeApp):
    async with (
        served(make_app(FakeEngine(*TWO_CALLS))) as url,
        async_client(url) as client,
        client.chat.completions.stream(**ASK, tools=[WEATHER]) as stream,
    ):
        events = [event async for event in stream]
        message = (await stream.get_final_completion()).choices[0].message
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [GetWeather(place="Paris"), GetWeather(place="Oslo")]
    assert [made.id for made in message.tool_calls or []] == ["call_a", "call_b"]


async def test_parsed_calls_go_back_as_they_are(make_app: MakeApp):
    engine = FakeEngine(START, *call(0, "call_a", "get_weather", PARIS), CALLED)

    def work(client: openai.OpenAI) -> None:
        message = client.chat.completions.parse(**ASK, tools=[WEATHER]).choices[0].message
        assert message.tool_calls and message.tool_calls[0].function.parsed_arguments == GetWeather(place="Paris")
        output = {"role": "tool", "tool_call_id": "call_a", "content": "Sun"}
        client.chat.completions.create(model=MODEL, messages=[QUESTION, message, output], tools=[WEATHER])

    await with_sync_client(make_app(engine), work)
    assert engine.request["messages"][1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # the SDK's, for its own ``parsed``
async def test_a_pydantic_model_as_the_answer_s_shape(make_app: MakeApp):
    text = FOUND.model_dump_json()
    engine = FakeEngine(START, Delta(text=text[:9]), Delta(text=text[9:]), END)

    def work(client: openai.OpenAI) -> None:
        message = client.chat.completions.parse(**ASK, response_format=Answer).choices[0].message
        assert message.parsed == FOUND
        client.chat.completions.create(model=MODEL, messages=[QUESTION, message, QUESTION])
        with client.chat.completions.stream(**ASK, response_format=Answer) as stream:
            partial = [event.parsed for event in stream if event.type == "content.delta" and event.parsed]
            assert stream.get_final_completion().choices[0].message.parsed == FOUND
        assert partial[-1] == FOUND.model_dump()

    await with_sync_client(make_app(engine), work)
    asked = engine.request["thinker"]["response_format"]
    assert (asked["type"], asked["json_schema"]["name"], asked["json_schema"]["strict"]) == (
        "json_schema",
        "Answer",
        True,
    )
    assert set(asked["json_schema"]["schema"]["properties"]) == {"city", "degrees"}


async def test_an_answer_that_is_cut_off_is_not_parsed(make_app: MakeApp):
    async with served(make_app(FakeEngine(START, Delta(text='{"city"'), LENGTH))) as url, async_client(url) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**ASK, response_format=Answer)


async def test_log_probabilities(make_app: MakeApp):
    told = tokens("Hel", "lo")
    script = (
        START,
        Delta(text="Hel", event={"logprobs": told[:1]}),
        Delta(text="lo", event={"logprobs": told[1:]}),
        END,
    )

    def work(client: openai.OpenAI) -> None:
        options = {**ASK, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**options).choices[0].logprobs
        assert whole and [token.model_dump() for token in whole.content or []] == told
        assert "".join(bytes(token.bytes or b"").decode() for token in whole.content or []) == "Hello"
        with client.chat.completions.stream(**options) as stream:
            deltas = [event for event in stream if event.type == "logprobs.content.delta"]
            final = stream.get_final_completion().choices[0].logprobs
        assert [len(event.content) for event in deltas] == [1, 1]
        assert final == whole

    await with_sync_client(make_app(FakeEngine(*script)), work)


async def test_several_choices(make_app: MakeApp):
    engine = FakeEngine(START, Delta(text="He"), Delta(text="llo"), END)
    async with served(make_app(engine)) as url, async_client(url) as client:
        whole = await client.chat.completions.create(**ASK, n=3, seed=5, temperature=1)
        assert [(choice.index, choice.message.content) for choice in whole.choices] == [(i, "Hello") for i in range(3)]
        assert whole.usage and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 15)
        assert [request["thinker"]["seed"] for request in engine.requests] == [5, 6, 7]
        options = {"n": 3, "stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(**ASK, **options) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["Hello"] * 3
        assert final.usage == whole.usage


async def test_what_is_refused_names_its_field(make_app: MakeApp):
    async with served(make_app(FakeEngine())) as url, async_client(url) as client:
        for options, param in (
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
            ({"n": 99}, "n"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"extra_body": {"min_p": 2}}, "min_p"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ASK, **options)
            assert refused.value.param == param
            assert json.loads(refused.value.response.text)["error"]["type"] == "invalid_request_error"
