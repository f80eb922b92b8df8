"""Every field that OpenAI's SDK can send is honoured, or refused by name."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionAudioParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)

from openai_frontend.message_schemas import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from openai_frontend.schemas import AudioOptions, ChatCompletionRequest, StreamOptions
from openai_frontend.strict import Only
from tests.openai_frontend.answers import WEATHER
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of

pytestmark = pytest.mark.asyncio
URL = "/v1/chat/completions"
SDK_FIELDS = sorted(
    typing.get_type_hints(CompletionCreateParamsNonStreaming) | typing.get_type_hints(CompletionCreateParamsStreaming)
)
OBJECT = {"type": "json_object"}
# What is sent beside a plain question, for each field that must change what the model is asked.
ASKS = {
    "audio": {"audio": {"voice": "ethan", "format": "wav"}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": -100}},
    "logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "max_tokens": {"max_tokens": 5},
    "messages": {"messages": [{"role": "user", "content": "Else"}]},
    "modalities": {"modalities": ["audio"]},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": [WEATHER]},
    "presence_penalty": {"presence_penalty": 0.5},
    "response_format": {"response_format": OBJECT},
    "seed": {"seed": 5},
    "stop": {"stop": "."},
    "temperature": {"temperature": 0.5},
    "tool_choice": {"tool_choice": "required", "tools": [WEATHER]},
    "tools": {"tools": [WEATHER]},
    "top_logprobs": {"top_logprobs": 5, "logprobs": True},
    "top_p": {"top_p": 0.5},
}
# What it is compared with where the field cannot stand alone.
BESIDE = {
    "parallel_tool_calls": {"tools": [WEATHER]},
    "tool_choice": {"tools": [WEATHER]},
    "top_logprobs": {"logprobs": True},
}
# Fields that shape the answer, and what must be seen of them.
ANSWERED = {
    "model": ({}, lambda text, asked: '"model":"omni"' in text),
    "n": ({"n": 2}, lambda text, asked: asked == 2 and '"index":1' in text),
    "stream": ({"stream": True}, lambda text, asked: text.startswith("data: ")),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda text, asked: '"prompt_tokens":7' in text,
    ),
}
# The caller's own notes, which have nothing to change.
LABELS = {
    "metadata": {"a": "b"},
    "prompt_cache_key": "x",
    "safety_identifier": "x",
    "user": "x",
}
SOMETHING = {"type": "something", "mode": "something"}


async def ask(make_app, body):
    engine = FakeEngine(START, END)
    async with client_of(make_app(engine)) as client:
        return await client.post(URL, json=body), engine


async def asked_of(make_app, body):
    response, engine = await ask(make_app, body)
    assert response.status_code == 200, response.text
    return {key: value for key, value in engine.request.items() if key != "request_id"}


@pytest.mark.parametrize("field", SDK_FIELDS)
async def test_a_field_is_honoured_or_refused_by_name(make_app, chat, field):
    if field in ASKS:
        plain = await asked_of(make_app, chat(**BESIDE.get(field, {})))
        assert await asked_of(make_app, chat(**ASKS[field])) != plain
    elif field in ANSWERED:
        body, seen = ANSWERED[field]
        response, engine = await ask(make_app, chat(**body))
        assert seen(response.text, len(engine.requests)), response.text
    elif field in LABELS:
        assert await asked_of(make_app, chat(**{field: LABELS[field]})) == await asked_of(make_app, chat())
        response, _ = await ask(make_app, chat(**{field: 5}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    else:
        for value in (SOMETHING, [SOMETHING], "something", 0.5, True):
            response, engine = await ask(make_app, chat(**{field: value}))
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["param"], field in error["message"]) == (field, True)
            assert not engine.requests


def is_refused(model: Any, name: str) -> bool:
    return any(isinstance(note, Only) for note in model.model_fields[name].metadata)


@pytest.mark.parametrize(
    ("sdks", "ours", "refused"),
    [
        (ChatCompletionDeveloperMessageParam, SystemMessage, {"name"}),
        (ChatCompletionSystemMessageParam, SystemMessage, {"name"}),
        (ChatCompletionUserMessageParam, UserMessage, {"name"}),
        (ChatCompletionAssistantMessageParam, AssistantMessage, {"name", "refusal", "function_call"}),
        (ChatCompletionToolMessageParam, ToolMessage, set()),
        (ChatCompletionAudioParam, AudioOptions, set()),
        (ChatCompletionStreamOptionsParam, StreamOptions, {"include_obfuscation"}),
    ],
)
async def test_the_fields_of_what_stands_within(sdks, ours, refused):
    """A field of the SDK's that is not among ours is refused as unknown."""
    fields = set(typing.get_type_hints(sdks)) & set(ours.model_fields)
    assert {name for name in fields if is_refused(ours, name)} == refused
    assert ours.model_config["extra"] == "forbid"


async def test_no_field_of_ours_is_read_by_nobody(make_app, chat):
    """Each is one of the SDK's, or changes what the model is asked, or is refused."""
    own = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "speaker": "chelsie",
        "talker": {"top_k": 5},
        "chunk_frames": [5],
        "initial_chunk_frames": 5,
        "chunk_policy": "adaptive",
        "mm_processor_kwargs": {"use_audio_in_video": True},
    }
    benchs = {"ref_audio", "ref_text", "task_type", "language", "max_new_tokens", "return_stage_metrics"}
    assert set(ChatCompletionRequest.model_fields) - set(SDK_FIELDS) == set(own) | benchs
    spoken = {"modalities": ["text", "audio"]}
    plain = await asked_of(make_app, chat(**spoken))
    for name, value in own.items():
        assert await asked_of(make_app, chat(**spoken, **{name: value})) != plain, name
    for name in benchs:
        response, _ = await ask(make_app, chat(**{name: "x"}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
