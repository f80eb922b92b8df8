"""POST /v1/audio/speech: one file as it is made, events, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import pytest
import soundfile

from openai_frontend.audio import FORMATS
from openai_frontend.engine import Delta
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine, LeavingClient, client_of
from tests.openai_frontend.test_audio import PCM, PIECES, read_back, same_sound
from triton_omni.errors import CapacityError, InvalidRequestError, StageError
from triton_omni.model_config import ModelConfig

pytestmark = pytest.mark.asyncio
URL = "/v1/audio/speech"
SPOKEN = (START, Delta(text="Hi"), *(Delta(audio=piece) for piece in PIECES), END)
BODY = {"model": MODEL, "input": "Grüße aus Köln."}


async def spoken(make_app, script=SPOKEN, **changes):
    engine = FakeEngine(*script)
    async with client_of(make_app(engine)) as client:
        return engine, await client.post(URL, json=BODY | changes)


def events_of(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("name", ["pcm", *FORMATS])
async def test_one_file_with_every_sample(make_app, name):
    _, response = await spoken(make_app, response_format=name)
    assert response.status_code == 200, response.text
    stored = "pcm16" if name == "pcm" else name
    assert response.headers["content-type"] == FORMATS[stored].media_type
    same_sound(stored, read_back(stored, response.content))


async def test_mp3_unless_asked_otherwise(make_app):
    _, response = await spoken(make_app)
    assert response.headers["content-type"] == FORMATS["mp3"].media_type
    same_sound("mp3", read_back("mp3", response.content))


async def test_the_model_is_asked_to_read(make_app):
    engine, _ = await spoken(
        make_app, voice="ETHAN", instructions="Whisper.", seed=7, talker={"top_k": 5}, chunk_policy="adaptive"
    )
    system, user = engine.request["messages"]
    assert (system["role"], user) == ("system", {"role": "user", "content": BODY["input"]})
    assert "exactly the words" in system["content"]
    assert system["content"].endswith("Whisper.")
    assert (engine.request["modalities"], engine.request["chunk_policy"]) == (["audio"], "adaptive")
    assert engine.request["speaker"] == "ETHAN"
    assert engine.request["talker"] == {"top_k": 5, "seed": 7}
    assert engine.request["thinker"]["max_tokens"] == len(BODY["input"].encode()) + 64
    assert (engine.request["thinker"]["temperature"], engine.request["thinker"]["seed"]) == (0.0, 7)


async def test_events(make_app):
    _, response = await spoken(make_app, stream_format="sse", response_format="pcm")
    *deltas, done = events_of(response)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"], validate=True) for event in deltas) == PCM.tobytes()
    usage = {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12}
    assert done == {"type": "speech.audio.done", "usage": usage}


async def test_the_first_sound_leaves_before_the_last_is_made(make_app):
    wait = asyncio.Event()
    engine = FakeEngine(START, Delta(audio=PCM.tobytes()), wait, END)
    client = LeavingClient(make_app(engine), BODY | {"response_format": "pcm"}, path=URL)
    async with asyncio.timeout(WITHIN_S):
        await engine.waits.wait()
        assert client.sent[0]["status"] == 200
        assert client.sent[1]["body"] == PCM.tobytes()
        client.leave()
        await engine.closed.wait()
        await client.done


async def test_nothing_said_is_an_empty_file(make_app):
    _, response = await spoken(make_app, (START, END), response_format="wav")
    samples, _ = soundfile.read(io.BytesIO(response.content))
    assert samples.size == 0


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize(
    ("error", "status"), [(CapacityError("full"), 429), (InvalidRequestError("messages", "is too long"), 400)]
)
async def test_an_error_before_the_first_sound_has_its_own_status(make_app, stream_format, error, status):
    _, response = await spoken(make_app, (START, Delta(text="Hi"), error), stream_format=stream_format)
    assert response.status_code == status
    assert response.json()["error"]["param"] == ("input" if status == 400 else None)


async def test_an_error_between_events_is_the_last(make_app):
    script = (START, Delta(audio=PCM.tobytes()), StageError("talker", "gone"))
    _, response = await spoken(make_app, script, stream_format="sse", response_format="pcm")
    assert "gone" in events_of(response)[-1]["error"]["message"]


async def test_an_error_in_the_file_breaks_it_off(make_app):
    """A client must not take half a file for the whole one."""
    engine = FakeEngine(START, Delta(audio=PCM.tobytes()), StageError("talker", "gone"))
    client = LeavingClient(make_app(engine), BODY | {"response_format": "pcm"}, path=URL)
    with pytest.raises(RuntimeError, match="already started"):  # whereupon a server closes the connection
        await client.done
    assert client.sent[-1]["more_body"]
    assert engine.closed.is_set()


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"input": None}, "input", "string"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": " \n"}, "input", "nothing to read"),
        ({"input": "x" * 4_097}, "input", "at most 4096 characters, got 4097"),
        ({"input": "\ud800"}, "input", "nicode"),
        ({"voice": "nobody"}, "voice", "ethan"),
        ({"voice": {"id": "voice_1"}}, "voice", "string"),
        ({"response_format": "8track"}, "response_format", "mp3"),
        ({"speed": 1.5}, "speed", "send 1"),
        ({"stream_format": "ndjson"}, "stream_format", "'sse'"),
        ({"instructions": 5}, "instructions", "string"),
        ({"talker": {"top_k": -1}}, "talker.top_k", "at least 0"),
        ({"chunk_frames": [0]}, "chunk_frames[0]", "1"),
        ({"inptu": "x"}, "inptu", "did you mean 'input'"),
    ],
)
async def test_bad_requests(make_app, changes, param, words):
    engine = FakeEngine(*SPOKEN)
    async with client_of(make_app(engine)) as client:
        body = json.dumps(BODY | changes)
        response = await client.post(URL, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert words in error["message"]
    assert not engine.request


async def test_speed_1_and_another_model(make_app):
    _, plain = await spoken(make_app, speed=1.0)
    _, missing = await spoken(make_app, model="tts-1")
    assert (plain.status_code, missing.status_code) == (200, 404)
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_the_longest_input_is_a_setting(make_app):
    async with client_of(make_app(FakeEngine(*SPOKEN), max_speech_characters=3)) as client:
        short = await client.post(URL, json=BODY | {"input": "abc"})
        long = await client.post(URL, json=BODY | {"input": "abcd"})
    assert (short.status_code, long.status_code) == (200, 400)


async def test_voices(make_app, checkpoint):
    async with client_of(make_app(FakeEngine())) as client:
        listed = (await client.get("/v1/audio/voices")).json()
    config = ModelConfig.load(checkpoint)
    assert listed["voices"][0] == config.default_speaker
    assert sorted(listed["voices"]) == sorted(config.speakers)
    assert [voice["id"] for voice in listed["data"]] == listed["voices"]
