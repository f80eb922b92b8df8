"""Bad requests as vLLM-Omni's clients know them: the same status, and the words they look for."""

from __future__ import annotations

import json
import re

import pytest
from websockets.asyncio.client import connect

from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of
from tests.openai_frontend.realtime.talk import served
from triton_omni.model_config import ModelConfig

CHAT = "/v1/chat/completions"
SPOKEN = {"modalities": ["text", "audio"]}
SCHEMA = {"type": "json_schema"}
# What is sent, the status, and words of which at least one must be in the answer.
ROWS = {
    "malformed JSON": ('{"model": "omni", "messages": [', 400, ["json_invalid", "decode error"]),
    "no messages": ({"messages": None}, 400, ["messages"]),
    "no messages, told as missing": ({"messages": None}, 400, ["missing", "Field required"]),
    "unknown model": ({"model": "gpt-4o"}, 404, ["does not exist", "NotFoundError"]),
    "stream is a word": ({"stream": "yes"}, 400, ["stream: must be a valid boolean"]),
    "temperature is a word": ({"temperature": "hot"}, 400, ["temperature: must be a valid number"]),
    "max_tokens is a word": ({"max_tokens": "many"}, 400, ["max_tokens: must be a valid integer"]),
    "modalities of numbers": ({"modalities": [123]}, 400, ["modalities"]),
    "unknown modality": ({"modalities": ["smell"]}, 400, ["modalities"]),
    "schema without a schema": ({"response_format": SCHEMA}, 400, ["response_format", "json_schema"]),
    "schema without a schema within": ({"response_format": SCHEMA | {"json_schema": {"name": "a"}}}, 400, ["schema"]),
    "logprobs is a word": ({"logprobs": "yes"}, 400, ["logprobs"]),
    "top_logprobs alone": ({"top_logprobs": 3}, 400, ["top_logprobs"]),
    "unknown speaker": ({"speaker": "nobody"} | SPOKEN, 400, ["Invalid speaker"]),
    "unknown speaker, what there is": ({"speaker": "nobody"} | SPOKEN, 400, ["Supported"]),
    "unknown voice": ({"audio": {"voice": "nobody"}} | SPOKEN, 400, ["Invalid speaker"]),
    "unknown audio format": ({"audio": {"format": "8track"}} | SPOKEN, 400, ["Invalid audio format"]),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ROWS)
async def test_a_bad_request(make_app, chat, name):
    sent, status, words = ROWS[name]
    content = sent if isinstance(sent, str) else json.dumps(chat(**sent))
    engine = FakeEngine(START, END)
    async with client_of(make_app(engine)) as client:
        response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert re.search("|".join(map(re.escape, words)), error["message"], re.IGNORECASE), error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.request


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [{"model": "omni", "prompt": "Hello"}, {}])
async def test_plain_completions(make_app, body):
    async with client_of(make_app(FakeEngine(START, END))) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "use chat completions" in response.json()["error"]["message"]


@pytest.mark.asyncio
async def test_the_speaker_s_error_lists_every_voice(make_app, chat, checkpoint):
    async with client_of(make_app(FakeEngine(START, END))) as client:
        response = await client.post(CHAT, json=chat(speaker="nobody", **SPOKEN))
    assert all(voice in response.json()["error"]["message"] for voice in ModelConfig.load(checkpoint).speakers)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [
        ("{not JSON", "invalid_json", "JSON"),
        (
            '{"type": "session.update", "session": {"type": "realtime", "output_modalities": "text"}}',
            None,
            "modalities",
        ),
    ],
    ids=["malformed JSON", "modalities are a word"],
)
async def test_a_bad_event_of_a_websocket(make_app, sent, code, words):
    async with (
        served(make_app(FakeEngine(START, END))) as url,
        connect(f"{url.replace('http', 'ws', 1)}/v1/realtime?model={MODEL}") as socket,
    ):
        assert json.loads(await socket.recv())["type"] == "session.created"
        await socket.send(sent)
        event = json.loads(await socket.recv())
    assert event["type"] == "error"
    assert event["error"]["type"] == "invalid_request_error"
    assert code in (None, event["error"]["code"])
    assert words in event["error"]["message"]
