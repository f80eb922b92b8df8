"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import soundfile

from openai_frontend.audio import FORMATS
from openai_frontend.engine import Delta
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of
from triton_omni.errors import CapacityError, InvalidRequestError, StageError

pytestmark = pytest.mark.asyncio
URLS = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}
URL = URLS["transcribe"]
WRITTEN = (START, Delta(text="Grüße, "), Delta(text="du"), END)
USAGE = {"type": "tokens", "input_tokens": 7, "output_tokens": 3, "total_tokens": 10}


def sound(name: str, length_s: float) -> bytes:
    tone = (np.sin(np.arange(int(length_s * 24_000)) / 10) * 9_000).astype(np.int16)
    return FORMATS[name].whole(tone.tobytes())


async def post(make_app, script=WRITTEN, url=URL, content=b"RIFF", files=None, settings=None, **fields):
    engine = FakeEngine(*script)
    files = {"file": ("speech.wav", content, "audio/wav")} if files is None else files
    async with client_of(make_app(engine, **(settings or {}))) as client:
        data = {name: value for name, value in ({"model": MODEL} | fields).items() if value is not None}
        return engine, await client.post(url, data=data, files=files)


@pytest.mark.parametrize("url", URLS.values())
async def test_json(make_app, url):
    engine, response = await post(make_app, url=url)
    assert response.json() == {"text": "Grüße, du", "usage": USAGE}
    assert engine.media == [b"RIFF"]
    assert engine.request["modalities"] == ["text"]
    assert engine.request["messages"][0]["content"][0] == {"type": "audio", "media": 0}


@pytest.mark.parametrize(
    ("url", "fields", "asked"),
    [
        (URL, {}, "Transcribe the audio into text."),
        (URL, {"language": "de"}, "Transcribe the German audio into text."),
        (URL, {"language": "YUE"}, "Transcribe the Cantonese audio into text."),
        (URLS["translate"], {}, "Listen to the provided speech and produce a translation in English text."),
    ],
)
async def test_what_the_model_is_asked(make_app, url, fields, asked):
    engine, _ = await post(make_app, url=url, temperature="0.25", **fields)
    assert engine.request["messages"][0]["content"][1]["text"] == asked
    assert engine.request["thinker"]["temperature"] == 0.25
    engine, _ = await post(make_app, url=url, prompt="Kölsch", **fields)
    told = engine.request["messages"][0]["content"][1]["text"]
    assert told.startswith(asked)
    assert told.endswith("Kölsch")
    assert engine.request["thinker"]["temperature"] == 0


async def test_text(make_app):
    _, response = await post(make_app, response_format="text")
    assert response.headers["content-type"].startswith("text/plain")
    assert response.text == "Grüße, du\n"


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus", "aac"])
async def test_verbose_json_has_the_true_length_and_no_segments(make_app, name):
    _, response = await post(make_app, content=sound(name, 1.5), response_format="verbose_json", language="de")
    answer = response.json()
    assert abs(answer["duration"] - 1.5) < 0.1
    assert (answer["task"], answer["language"], answer["text"]) == ("transcribe", "german", "Grüße, du")
    assert "segments" not in answer and "words" not in answer


async def test_a_model_that_repeats_itself_is_stopped_by_the_sounds_length(make_app):
    engine, _ = await post(make_app, content=sound("wav", 10))
    assert engine.request["thinker"]["max_tokens"] == 256 + 200
    engine, _ = await post(make_app, content=b"no length")
    assert engine.request["thinker"]["max_tokens"] > 1_000


async def test_a_translation_is_english(make_app):
    _, response = await post(make_app, url=URLS["translate"], content=sound("wav", 0.5), response_format="verbose_json")
    assert (response.json()["task"], response.json()["language"]) == ("translate", "english")


@pytest.mark.parametrize("url", URLS.values())
async def test_events(make_app, url):
    _, response = await post(make_app, url=url, stream="true")
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    *deltas, done = [json.loads(event.removeprefix("data: ")) for event in events]
    assert deltas == [{"type": "transcript.text.delta", "delta": text} for text in ("Grüße, ", "du")]
    assert done == {"type": "transcript.text.done", "text": "Grüße, du", "usage": USAGE}


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (CapacityError("full"), 429, None),
        (InvalidRequestError("messages[0].content[0]", "is no audio"), 400, "file"),
        (InvalidRequestError("messages", "is too long"), 400, "file"),
    ],
)
async def test_failures_of_the_runtime(make_app, stream, error, status, param):
    _, response = await post(make_app, (error,), stream=stream)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_an_error_between_events_is_the_last(make_app):
    _, response = await post(make_app, (START, Delta(text="Hi"), StageError("thinker", "gone")), stream="true")
    assert "gone" in response.text.split("\n\n")[-2]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": None}, "model", "is missing"),
        ({"response_format": "srt"}, "response_format", "no times"),
        ({"response_format": "vtt"}, "response_format", "no times"),
        ({"response_format": "yaml"}, "response_format", "json, text, verbose_json"),
        ({"response_format": "verbose_json"}, "language", "json"),
        ({"response_format": "text", "stream": "true"}, "response_format", "stream"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "not supported"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"chunking_strategy": "auto"}, "chunking_strategy", "not supported"),
        ({"language": "tlh"}, "language", "yue"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": "3"}, "temperature", "[0, 2]"),
        ({"temperature": "nan"}, "temperature", "[0, 2]"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"langauge": "de"}, "langauge", "did you mean 'language'"),
    ],
)
async def test_bad_fields(make_app, fields, param, words):
    engine, response = await post(make_app, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert words in error["message"]
    assert not engine.request


async def test_a_translation_has_no_language(make_app):
    _, response = await post(make_app, url=URLS["translate"], language="de")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "language")


@pytest.mark.parametrize(
    ("files", "param", "words"),
    [
        ({"file": ("a.wav", b"")}, "file", "no data"),
        ({"file": ("a.wav", bytes(1_001))}, "file", "1000"),
        ({"file": (None, b"text")}, "file", "file name"),
        ({"sound": ("a.wav", b"x")}, "file", "missing"),
        ([("file", ("a.wav", b"x")), ("file", ("b.wav", b"x"))], None, "Too many files"),
    ],
)
async def test_bad_files(make_app, files, param, words):
    engine, response = await post(make_app, files=files, settings={"max_media_bytes": 1_000})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert words in response.json()["error"]["message"]
    assert not engine.request


async def test_what_is_no_audio_has_no_length(make_app):
    _, response = await post(make_app, response_format="verbose_json", language="de", content=b"no sound at all")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    picture = io.BytesIO()
    soundfile.write(picture, np.zeros(0), 16_000, format="WAV")
    _, empty = await post(make_app, response_format="verbose_json", language="de", content=picture.getvalue())
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "file")


async def test_a_file_that_names_another_is_not_followed(make_app, tmp_path, monkeypatch):
    (tmp_path / "other.wav").write_bytes(sound("wav", 0.5))
    monkeypatch.chdir(tmp_path)
    playlist = b"ffconcat version 1.0\nfile other.wav\n"
    _, response = await post(make_app, response_format="verbose_json", language="de", content=playlist)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize(
    ("content", "type_"),
    [
        (b'{"model": "omni"}', "application/json"),
        (b"model=omni", "application/x-www-form-urlencoded"),
        (b"", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=b"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", "multipart/form-data; boundary=b"),
    ],
)
async def test_bodies_that_are_no_form(make_app, content, type_):
    async with client_of(make_app(FakeEngine())) as client:
        response = await client.post(URL, content=content, headers={"content-type": type_})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_large_bodies_are_refused_while_they_come(make_app):
    _, response = await post(make_app, content=bytes(5_000), settings={"max_body_bytes": 1_000})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


async def test_the_api_describes_the_form(make_app):
    async with client_of(make_app(FakeEngine())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    schema = paths[URL]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["required"] == ["file", "model"]
    assert schema["properties"]["file"] == {"type": "string", "format": "binary"}
    assert "de" in json.dumps(schema["properties"]["language"])
