"""Log probabilities: what is asked of omni_bls, and where they stand in answers."""

from __future__ import annotations

import pytest

from openai_frontend.engine import Delta
from tests.openai_frontend.answers import tokens
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of, events_of

pytestmark = pytest.mark.asyncio
URL = "/v1/chat/completions"
HEL, LO, EMOJI = tokens("Hel", "lo", " 🙂")
# The last one is a token whose text is held back: it may belong to a stop string.
SCRIPT = (
    START,
    Delta(text="Hel", event={"logprobs": [HEL]}),
    Delta(text="lo 🙂", event={"logprobs": [LO, EMOJI]}),
    Delta(event={"logprobs": tokens("#")}),
    END,
)


async def ask(make_app, body, script=SCRIPT):
    engine = FakeEngine(*script)
    async with client_of(make_app(engine)) as client:
        response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response, engine


@pytest.mark.parametrize(
    ("asked", "wire"),
    [
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
async def test_what_is_asked(make_app, chat, asked, wire):
    _, engine = await ask(make_app, chat(**asked))
    assert engine.request.get("thinker") == wire


async def test_of_a_whole_answer(make_app, chat):
    response, _ = await ask(make_app, chat(logprobs=True, top_logprobs=2))
    assert response.json()["choices"][0]["logprobs"] == {"content": [HEL, LO, EMOJI, *tokens("#")], "refusal": None}


async def test_of_an_answer_without_tokens(make_app, chat):
    response, _ = await ask(make_app, chat(logprobs=True), (START, END))
    assert response.json()["choices"][0]["logprobs"] == {"content": [], "refusal": None}


async def test_of_a_stream_stand_with_their_text(make_app, chat):
    response, _ = await ask(make_app, chat(logprobs=True, stream=True))
    choices = [event["choices"][0] for event in events_of(response)]
    told = [(choice["delta"], choice["logprobs"] and choice["logprobs"]["content"]) for choice in choices]
    assert told[1:] == [({"content": "Hel"}, [HEL]), ({"content": "lo 🙂"}, [LO, EMOJI]), ({}, tokens("#")), ({}, None)]


async def test_of_speech_too(make_app, chat):
    script = (*SCRIPT[:-1], Delta(audio=bytes(20)), END)
    response, _ = await ask(make_app, chat(logprobs=True, modalities=["audio"]), script)
    assert len(response.json()["choices"][0]["logprobs"]["content"]) == 4
