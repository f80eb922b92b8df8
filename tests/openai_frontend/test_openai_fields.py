"""Tools, structured output, log probabilities and choices through the ``openai`` client, against the running stack."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.realtime.talk import talk_with
from triton_omni.serve.frontend import FrontendProcess

pytestmark = pytest.mark.triton
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
GREEDY: dict[str, Any] = {**ASK, "temperature": 0, "max_tokens": 8}


class GetWeather(BaseModel):
    place: Literal["Paris", "Oslo"]


class GetTime(BaseModel):
    utc: bool


class Verdict(BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


# The null thinker calls each with arguments of its own.
ANY_TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
TOOLS = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(GetTime)]


@pytest.fixture
def holds_to_a_form(request: pytest.FixtureRequest) -> bool:
    """Whether the demo's thinker is vLLM's."""
    return request.node.callspec.params["demo_server"] == "vllm"


def names(message: Any) -> list[str]:
    return [call.function.name for call in message.tool_calls or ()]


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_calls(client: openai.OpenAI, modalities: list[Any]):
    asked = {**ASK, "tools": ANY_TOOLS, "tool_choice": "required", "modalities": modalities}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert names(choice.message) == ["get_weather", "get_time"]
    assert (choice.message.content, choice.message.audio) == (None, None)
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in choice.message.tool_calls or ())
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    assert names(streamed.message) == names(choice.message)
    assert streamed.finish_reason == "tool_calls"


def test_speech_beside_a_call(client: openai.OpenAI):
    asked = {**ASK, "tools": ANY_TOOLS, "parallel_tool_calls": False, "modalities": ["text", "audio"]}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content and message.audio and message.audio.transcript == message.content
    assert len(names(message)) == 1


def test_log_probabilities(client: openai.OpenAI):
    told = client.chat.completions.create(**ASK, max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert told and [token.token for token in told.content or ()] == ["w0 ", "w1 ", "w2 "]
    assert [[other.logprob for other in token.top_logprobs] for token in told.content or ()] == [[-1, -2]] * 3


def test_several_choices(client: openai.OpenAI):
    answer = client.chat.completions.create(**ASK, n=3, max_tokens=3)
    assert [choice.message.content for choice in answer.choices] == ["w0 w1 w2 "] * 3
    alone = client.chat.completions.create(**ASK, max_tokens=3).usage
    assert answer.usage and alone
    assert answer.usage.prompt_tokens == alone.prompt_tokens
    assert answer.usage.completion_tokens == 3 * alone.completion_tokens


@pytest.mark.asyncio
async def test_a_realtime_call(null_frontend: FrontendProcess):
    async with talk_with(null_frontend.url) as talk:
        tool = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}
        await talk.update(tools=[tool], tool_choice="required", output_modalities=["text"])
        await talk.write("The time?")
        (call,) = (await talk.until("response.done")).response.output
        assert (call.type, call.name, call.status) == ("function_call", "get_time", "completed")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Noon"}
        await talk.send("conversation.item.create", item=output)
        await talk.send("response.create", response={"tool_choice": "none", "max_output_tokens": 3})
        response = (await talk.until("response.done")).response
        assert response.output[0].content[0].text == "w0 w1 w2 "


def test_the_demo_model_s_log_probabilities(demo: openai.OpenAI):
    choice = demo.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs and choice.logprobs.content
    for token in choice.logprobs.content:
        ranked = [other.logprob for other in token.top_logprobs]
        assert ranked == sorted(ranked, reverse=True) and len(ranked) == 3
        assert token.logprob == ranked[0] < 0
    assert len(choice.logprobs.content) <= GREEDY["max_tokens"]


def test_the_demo_model_s_choices_are_those_of_the_seeds_that_follow(demo: openai.OpenAI):
    asked = {**ASK, "max_tokens": 8, "temperature": 2}
    together = demo.chat.completions.create(**asked, n=2, seed=5).choices
    alone = [demo.chat.completions.create(**asked, seed=seed).choices[0] for seed in (5, 6)]
    assert [choice.message.content for choice in together] == [choice.message.content for choice in alone]
    assert together[0].message.content != together[1].message.content


def test_the_demo_model_is_biased(demo: openai.OpenAI):
    plain = demo.chat.completions.create(**GREEDY).choices[0].message.content
    banned = {str(token_id): -100 for token_id in range(1, 1_000, 2)}
    assert demo.chat.completions.create(**GREEDY, logit_bias=banned).choices[0].message.content != plain


def test_the_demo_model_answers_in_a_form(demo: openai.OpenAI, holds_to_a_form: bool):
    asked = {**GREEDY, "max_tokens": 300, "frequency_penalty": 2}  # or random weights write white space for ever
    if not holds_to_a_form:
        with pytest.raises(openai.BadRequestError) as refused:
            demo.chat.completions.parse(**asked, response_format=Verdict)
        assert refused.value.param == "response_format.type"
        return
    assert isinstance(demo.chat.completions.parse(**asked, response_format=Verdict).choices[0].message.parsed, Verdict)
    with demo.chat.completions.stream(**asked, response_format=Verdict) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)


def test_the_demo_model_calls(demo: openai.OpenAI, holds_to_a_form: bool):
    asked = {**GREEDY, "max_tokens": 200, "tools": TOOLS, "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "GetTime"}}
    if not holds_to_a_form:
        with pytest.raises(openai.BadRequestError) as refused:
            demo.chat.completions.create(**asked, tool_choice=named)
        assert refused.value.param == "tool_choice"
        return
    choice = demo.chat.completions.parse(**asked, tool_choice=named).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, GetTime)
    output = {"role": "tool", "tool_call_id": call.id, "content": "Noon"}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call.to_dict()]}, output]
    answer = demo.chat.completions.create(**asked | {"messages": messages}, tool_choice="none")
    assert answer.choices[0].message.content
