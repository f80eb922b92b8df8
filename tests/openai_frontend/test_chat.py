"""The shapes of answers, whole and streamed."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import soundfile

from openai_frontend.engine import Delta
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of, events_of
from triton_omni.errors import InvalidRequestError, StageError

pytestmark = pytest.mark.asyncio
URL = "/v1/chat/completions"
PCM = np.random.default_rng(0).integers(-30_000, 30_000, 1_001, dtype=np.int16)
# Pieces of 1, 500 and 500 samples: none ends on a base64 group by itself.
SPOKEN = (
    *(START, Delta(text="Grüße, "), Delta(audio=PCM[:1].tobytes()), Delta(text="du")),
    *(Delta(audio=PCM[1:501].tobytes()), Delta(audio=PCM[501:].tobytes()), END),
)
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"text_tokens": 7, "audio_tokens": 0, "cached_tokens": 0},
    "completion_tokens_details": {"text_tokens": 3, "audio_tokens": 2, "reasoning_tokens": 0},
}


async def whole(make_app, body):
    async with client_of(make_app(FakeEngine(*SPOKEN))) as client:
        response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(make_app, body, script=SPOKEN):
    async with client_of(make_app(FakeEngine(*script))) as client:
        return events_of(await client.post(URL, json=body | {"stream": True}))


def joined(events):
    """What a client that joins all deltas ends with."""
    result = {"content": None, "transcript": None, "data": "", "ids": [], "expires_at": [], "finish": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            audio = delta.get("audio", {})
            for name, value in (("content", delta.get("content")), ("transcript", audio.get("transcript"))):
                if value is not None:
                    result[name] = (result[name] or "") + value
            result["data"] += audio.get("data", "")
            result["ids"] += [audio["id"]] if "id" in audio else []
            result["expires_at"] += [audio["expires_at"]] if "expires_at" in audio else []
            result["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return result


async def test_text_alone(make_app, chat):
    answer = await whole(make_app, chat())
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("chatcmpl-")
    assert answer["usage"] == USAGE
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Grüße, du", "refusal": None}


@pytest.mark.parametrize(("modalities", "content"), [(["text", "audio"], "Grüße, du"), (["audio"], None)])
async def test_speech_is_one_wav_in_the_same_choice(make_app, chat, modalities, content):
    (choice,) = (await whole(make_app, chat(modalities=modalities)))["choices"]
    assert choice["message"]["content"] == content
    audio = choice["message"]["audio"]
    assert audio["transcript"] == "Grüße, du"
    assert audio["id"] and isinstance(audio["expires_at"], int)
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(audio["data"])), dtype="int16")
    assert rate_hz == 24_000
    assert np.array_equal(samples, PCM)


async def test_whole_answer_as_bare_samples(make_app, chat):
    (choice,) = (await whole(make_app, chat(audio={"format": "pcm16"})))["choices"]
    assert base64.b64decode(choice["message"]["audio"]["data"]) == PCM.tobytes()


async def test_text_stream(make_app, chat):
    events = await streamed(make_app, chat())
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
    assert all("audio" not in event["choices"][0]["delta"] and "usage" not in event for event in events)
    assert joined(events)["content"] == "Grüße, du"
    assert joined(events)["finish"] == ["stop"]


@pytest.mark.parametrize(("modalities", "content"), [(["text", "audio"], "Grüße, du"), (["audio"], None)])
async def test_speech_stream(make_app, chat, modalities, content):
    result = joined(await streamed(make_app, chat(modalities=modalities)))
    assert (result["content"], result["transcript"]) == (content, "Grüße, du")
    assert base64.b64decode(result["data"], validate=True) == PCM.tobytes()
    assert len(result["ids"]) == len(result["expires_at"]) == len(result["finish"]) == 1


async def test_each_audio_delta_decodes_alone(make_app, chat):
    events = await streamed(make_app, chat(modalities=["audio"]))
    pieces = [
        event["choices"][0]["delta"]["audio"]["data"] for event in events if '"data"' in str(event).replace("'", '"')
    ]
    assert len(pieces) == 3
    decoded = [base64.b64decode(piece, validate=True) for piece in pieces]
    assert all(len(piece) % 2 == 0 for piece in decoded)
    assert b"".join(decoded) == PCM.tobytes()


async def test_streamed_wav_is_one_file(make_app, chat):
    result = joined(await streamed(make_app, chat(audio={"format": "wav"})))
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(result["data"])), dtype="int16")
    assert rate_hz == 24_000
    assert np.array_equal(samples, PCM)


async def test_an_answer_without_speech_is_an_empty_wav(make_app, chat):
    result = joined(await streamed(make_app, chat(audio={"format": "wav"}), (START, END)))
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(result["data"])))
    assert samples.size == 0
    assert (result["content"], len(result["ids"])) == ("", 1)


async def test_usage_comes_last_and_only_on_request(make_app, chat):
    *events, last = await streamed(make_app, chat(stream_options={"include_usage": True}))
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert all(event["usage"] is None for event in events)


async def test_chunks_tell_their_modality(make_app, chat):
    events = await streamed(make_app, chat(modalities=["text", "audio"]))
    for event in events:
        has_data = "data" in event["choices"][0]["delta"].get("audio", {})
        assert not has_data or event["modality"] == "audio"


async def test_an_error_before_the_first_piece_has_its_own_status(make_app, chat):
    error = InvalidRequestError("messages[0].content[0].media", "is no audio")
    async with client_of(make_app(FakeEngine(error))) as client:
        response = await client.post(URL, json=chat(stream=True))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].media"


@pytest.mark.parametrize(
    ("error", "type_", "told"),
    [(StageError("talker", "gone"), "server_error", "gone"), (ZeroDivisionError("secret"), "server_error", "internal")],
)
async def test_an_error_in_the_stream_is_its_last_event(make_app, chat, error, type_, told):
    *_, text, last = await streamed(make_app, chat(), (START, Delta(text="Hal"), error))
    assert text["choices"][0]["delta"] == {"content": "Hal"}
    assert last["error"]["type"] == type_
    assert told in last["error"]["message"]
    assert "secret" not in last["error"]["message"]
