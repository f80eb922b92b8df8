"""Bad requests: status, OpenAI's error shape, and the field by the client's name."""

from __future__ import annotations

import base64
import json

import pytest

from tests.openai_frontend.fakes import END, START, FakeEngine, client_of
from triton_omni.errors import CapacityError, OmniError, RequestTimeoutError, StageError
from triton_omni.model_config import ModelConfig

pytestmark = pytest.mark.asyncio
URL = "/v1/chat/completions"


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url):
    return user({"type": "image_url", "image_url": {"url": url}})


def speech(data, **more):
    return user({"type": "text", "text": "?"}, {"type": "input_audio", "input_audio": {"data": data} | more})


def schema(**json_schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a"} | json_schema}}


def tool(**function):
    return {"tools": [{"type": "function", "function": function}]}


def choice(function):
    return {"tool_choice": {"type": "function", "function": function}}


def allowed(*names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}}


SPOKEN = {"modalities": ["text", "audio"]}
# changes to a good body -> param, and words that the message must hold
BAD = [
    ({"messages": None}, "messages", "is missing"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or a list"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must not be empty"),
    ({"messages": [{"role": "user", "content": "x", "name": "Eve"}]}, "messages[0].name", "not supported"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "nicode"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"audio": {"format": "\ud800"}}, "audio.format", ""),
    ({"response_format": {"\ud800": "\ud800"}}, "response_format.type", ""),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "assistant said"),
    (
        {"messages": [{"role": "assistant", "audio": {"id": "audio-1"}}]},
        "messages[0].audio.id",
        "'audio-1' is not known",
    ),
    ({"messages": [{"role": "assistant", "audio": {}}]}, "messages[0].audio", "transcript"),
    (user({"type": "text"}), "messages[0].content[0].text", "is missing"),
    (user({"type": "text", "text": 5}), "messages[0].content[0].text", "string"),
    (user({"type": "hologram"}), "messages[0].content[0].type", "'input_audio'"),
    (user({"type": "text", "text": "x", "txt": 1}), "messages[0].content[0].txt", "'text'"),
    (user({"type": "image_url", "image_url": "x"}), "messages[0].content[0].image_url", "image_url"),
    (image("https://example.com/a.png"), "messages[0].content[0].image_url.url", "data:image/png;base64"),
    (image("file:///etc/passwd"), "messages[0].content[0].image_url.url", "local files"),
    (image("cat.png"), "messages[0].content[0].image_url.url", "data URL"),
    (image("data:image/png,abc"), "messages[0].content[0].image_url.url", "base64"),
    (image("data:audio/wav;base64,AAAA"), "messages[0].content[0].image_url.url", "must hold image"),
    (image("data:image/png;base64,"), "messages[0].content[0].image_url.url", "no data"),
    (speech("%%%", format="wav"), "messages[0].content[1].input_audio.data", "base64"),
    (speech("é", format="wav"), "messages[0].content[1].input_audio.data", "base64"),
    (speech(base64.b64encode(bytes(2000)).decode(), format="wav"), "messages[0].content[1].input_audio.data", "1000"),
    (speech("AAAA", format="midi"), "messages[0].content[1].input_audio.format", "'wav'"),
    (speech("AAAA"), "messages[0].content[1].input_audio.format", "is missing"),
    ({"model": None}, "model", "is missing"),
    ({"model": 5}, "model", "string"),
    ({"modalities": "audio"}, "modalities", "list"),
    ({"modalities": []}, "modalities", "must not be empty"),
    ({"modalities": [123]}, "modalities[0]", "'audio'"),
    ({"modalities": ["text", "smell"]}, "modalities[1]", "'audio'"),
    ({"modalities": ["text", "text"]}, "modalities", "once"),
    ({"audio": {"voice": "nobody"}}, "audio.voice", "ethan"),
    ({"speaker": "nobody"} | SPOKEN, "speaker", "ethan"),
    ({"speaker": "ethan", "audio": {"voice": "nobody"}}, "speaker", "audio.voice"),
    ({"audio": {"format": "8track"}}, "audio.format", "wav, pcm16, flac, mp3, opus, aac"),
    ({"audio": {"voice": "ethan"}, "modalities": ["text"]}, "audio", "modalities"),
    ({"talker": {"top_k": 5}}, "talker", "modalities"),
    ({"talker": {"top_k": -1}} | SPOKEN, "talker.top_k", "at least 0"),
    ({"talker": {"topk": 1}} | SPOKEN, "talker.topk", "top_k"),
    ({"chunk_frames": [0]} | SPOKEN, "chunk_frames[0]", "1"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": 2.5}, "temperature", "[0, 2]"),
    ({"temperature": -1}, "temperature", "[0, 2]"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": 10**30}, "top_k", "less than"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": "many"}, "max_tokens", "integer"),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "max_tokens"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": "\ud800"}, "stop", "nicode"),
    ({"temperature": float("nan")}, "temperature", "[0, 2]"),
    ({"seed": -1}, "seed", "[0,"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"initial_chunk_frames": 0} | SPOKEN, "initial_chunk_frames", "[1, 300]"),
    ({"initial_chunk_frames": 4}, "initial_chunk_frames", "modalities"),
    ({"initial_chunk_frames": 4, "chunk_frames": [4]} | SPOKEN, "initial_chunk_frames", "chunk_frames"),
    ({"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.fps", "use_audio_in_video"),
    ({"mm_processor_kwargs": {"use_audio_in_video": 1}}, "mm_processor_kwargs.use_audio_in_video", "boolean"),
    ({"audio": {"speed": 1.5}}, "audio.speed", "send 1"),
    ({"audio": {"dialect": "morse"}}, "audio.dialect", "'vllm-omni'"),
    ({"audio": {"dialect": "vllm-omni"}}, "audio.dialect", "stream"),
    ({"task_type": "Base"}, "task_type", "vllm-omni"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16"),
    ({"metadata": {"x": 1}}, "metadata.x", "string"),
    ({"n": 0}, "n", "equal to 1"),
    ({"n": 17}, "n", "16"),
    ({"n": True}, "n", "integer"),
    ({"n": 2} | SPOKEN, "n", "'audio' in modalities"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "[-2, 2]"),
    ({"presence_penalty": "much"}, "presence_penalty", "number"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "[-100, 100]"),
    ({"logit_bias": {"sea": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": [5]}, "logit_bias", "object"),
    ({"logprobs": "yes"}, "logprobs", "boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "[0, 20]"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_object'"),
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": "json"}, "response_format", "object"),
    (schema(), "response_format.json_schema.schema", "is missing"),
    (schema(schema=5), "response_format.json_schema.schema", "object"),
    (schema(schema={"\ud800": 1}), "response_format.json_schema.schema", "nicode"),
    (schema(schema={}, name="a b"), "response_format.json_schema.name", "pattern"),
    (schema(schema={}, scheme={}), "response_format.json_schema.scheme", "did you mean 'schema'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "must be 'function'"),
    (tool(name="a b"), "tools[0].function.name", "pattern"),
    (tool(name="a", parameters=5), "tools[0].function.parameters", "object"),
    (tool(name="a", parameters={"a": "\ud800"}), "tools[0].function.parameters", "nicode"),
    (tool(name="a", parameters={"type": "array"}), "tools[0].function.parameters.type", "'object'"),
    (tool(name="a") | {"tool_choice": "any"}, "tool_choice", "'required'"),
    (tool(name="a") | {"tool_choice": 5}, "tool_choice", '"allowed_tools"'),
    (tool(name="a") | {"tool_choice": {"type": "mcp"}}, "tool_choice", '"allowed_tools"'),
    (tool(name="a") | choice({}), "tool_choice.function.name", "is missing"),
    (tool(name="a") | choice({"name": "b"}), "tool_choice.function.name", "must be one of the tools (a)"),
    (tool(name="a") | allowed("b"), "tool_choice.allowed_tools.tools[0].function.name", "must be one of the tools (a)"),
    (tool(name="a") | allowed(), "tool_choice.allowed_tools.tools", "must not be empty"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "without tools"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].type",
        "is missing",
    ),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call", "send tool_calls"),
    ({"functions": [{"name": "a"}]}, "functions", "send tools"),
    ({"function_call": {"name": "a"}}, "function_call", "send tools and tool_choice"),
    ({"store": True}, "store", "send false"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"\ud800": 1}, "?", "not known"),
]


@pytest.mark.parametrize(("changes", "param", "words"), BAD, ids=[str(changes)[:60] for changes, *_ in BAD])
async def test_bad_requests(make_app, chat, changes, param, words):
    engine = FakeEngine(START, END)
    async with client_of(make_app(engine, max_media_bytes=1000)) as client:
        response = await client.post(
            URL, content=json.dumps(chat(**changes)), headers={"content-type": "application/json"}
        )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert param in error["message"]
    assert not engine.request


async def test_the_model_must_exist(make_app, chat):
    async with client_of(make_app(FakeEngine(START, END))) as client:
        response = await client.post(URL, json=chat(model="gpt-4o"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "does not exist" in response.json()["error"]["message"]


async def test_the_voices_error_lists_every_voice(make_app, chat, checkpoint):
    async with client_of(make_app(FakeEngine(START, END))) as client:
        response = await client.post(URL, json=chat(audio={"voice": "nobody"}))
    assert all(voice in response.json()["error"]["message"] for voice in ModelConfig.load(checkpoint).speakers)


@pytest.mark.parametrize(
    ("content", "type_", "words"),
    [
        (b'{"model": ', "application/json", "not JSON"),
        (b"\xff\xfe", "application/json", ""),
        (b"[" * 100_000, "application/json", ""),
        (b"[]", "application/json", "object"),
        (b"null", "application/json", ""),
        (b"", "application/json", ""),
        (b"model=omni", "application/x-www-form-urlencoded", "application/json"),
    ],
)
async def test_bodies_that_are_no_request(make_app, content, type_, words):
    async with client_of(make_app(FakeEngine())) as client:
        response = await client.post(URL, content=content, headers={"content-type": type_})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("full"), 429, "rate_limit_exceeded"),
        (RequestTimeoutError("late"), 504, "timeout"),
        (StageError("talker", "broken"), 500, "stage_failed"),
        (OmniError("?"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_of_the_runtime(make_app, chat, error, status, code, stream):
    async with client_of(make_app(FakeEngine(error))) as client:
        response = await client.post(URL, json=chat(stream=stream))
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 429)


async def test_routes_that_are_not_there(make_app):
    async with client_of(make_app(FakeEngine())) as client:
        missing, wrong = await client.get("/v1/nothing"), await client.get(URL)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    for response in (missing, wrong):
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("declared", [True, False])
async def test_large_bodies_are_refused(make_app, declared):
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    content = b" " * 2_000 if declared else pieces()
    async with client_of(make_app(FakeEngine(), max_body_bytes=1_000)) as client:
        response = await client.post(URL, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
