"""The ``openai`` client's audio calls against the running stack, and a guarded frontend with two workers before it."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
import openai
import pytest
import soundfile

from tests.openai_frontend.conftest import MODEL, client_for, frontend_of
from tests.openai_frontend.fakes import WITHIN_S
from tests.openai_frontend.test_audio import read_back
from tests.openai_frontend.test_metrics import figures
from triton_omni.model_config import ModelConfig
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton
READ = {"model": MODEL, "input": "Good morning."}
TEXT = "".join(f"w{number} " for number in range(40))  # what the null thinker always answers


@pytest.fixture(scope="module")
def voice(checkpoint) -> str:
    return list(ModelConfig.load(checkpoint).speakers)[-1]


@pytest.fixture(scope="module")
def wav() -> tuple[str, bytes, str]:
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(16_000) / 10), 16_000, format="WAV")
    return ("speech.wav", file.getvalue(), "audio/wav")


def test_speech_is_the_same_in_every_way_to_ask_for_it(client: openai.OpenAI, voice: str):
    whole = client.audio.speech.create(**READ, voice=voice, response_format="pcm").content
    assert np.abs(np.frombuffer(whole, np.int16)).max() > 1_000
    with client.audio.speech.with_streaming_response.create(**READ, voice=voice, response_format="pcm") as response:
        pieces = list(response.iter_bytes())
    assert b"".join(pieces) == whole
    assert len(pieces) > 3
    wav = client.audio.speech.create(**READ, voice=voice, response_format="wav").content
    samples, rate_hz = soundfile.read(io.BytesIO(wav), dtype="int16")
    assert (rate_hz, samples.tobytes()) == (24_000, whole)
    flac = client.audio.speech.create(**READ, voice=voice, response_format="flac").content
    assert read_back("flac", flac).tobytes() == whole
    mp3 = client.audio.speech.create(**READ, voice=voice).content
    assert abs(read_back("mp3", mp3).size - len(whole) // 2) < 5_000


def test_speech_as_events(client: openai.OpenAI, voice: str):
    whole = client.audio.speech.create(**READ, voice=voice, response_format="pcm").content
    options = {"voice": voice, "response_format": "pcm", "stream_format": "sse"}
    with client.audio.speech.with_streaming_response.create(**READ, **options) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    *deltas, done = [json.loads(event) for event in events]
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == whole
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"]


def test_what_speech_refuses(client: openai.OpenAI, voice: str):
    with pytest.raises(openai.BadRequestError, match=voice) as caught:
        client.audio.speech.create(**READ, voice="alloy")
    assert caught.value.param == "voice"
    with pytest.raises(openai.NotFoundError) as missing:
        client.audio.speech.create(**(READ | {"model": "tts-1"}), voice=voice)
    assert missing.value.code == "model_not_found"


def test_transcriptions(client: openai.OpenAI, wav: tuple[str, bytes, str]):
    create = client.audio.transcriptions.create
    plain = create(model=MODEL, file=wav)
    assert plain.text == TEXT
    assert (plain.usage.type, plain.usage.output_tokens) == ("tokens", 40)
    assert create(model=MODEL, file=wav, response_format="text").strip() == TEXT.strip()
    verbose = create(
        model=MODEL, file=wav, response_format="verbose_json", language="en", prompt="Sea", temperature=0.2
    )
    assert (verbose.text, verbose.language, verbose.duration, verbose.segments) == (TEXT, "english", 1.0, None)
    *deltas, done = create(model=MODEL, file=wav, stream=True)
    assert {delta.type for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta.delta for delta in deltas) == done.text == TEXT
    assert done.usage.output_tokens == 40


def test_translations(client: openai.OpenAI, wav: tuple[str, bytes, str]):
    with pytest.deprecated_call():  # the client's own; its REST route stays
        assert client.audio.translations.create(model=MODEL, file=wav).text == TEXT


def test_what_transcriptions_refuse(client: openai.OpenAI, wav: tuple[str, bytes, str]):
    create = client.audio.transcriptions.create
    with pytest.raises(openai.BadRequestError) as times:
        create(model=MODEL, file=wav, response_format="verbose_json", timestamp_granularities=["word"])
    assert times.value.param == "timestamp_granularities"
    with pytest.raises(openai.BadRequestError) as subtitles:
        create(model=MODEL, file=wav, response_format="srt")
    assert subtitles.value.param == "response_format"


def test_the_demo_model_hears_and_refuses_what_is_no_sound(
    demo_frontend: FrontendProcess, wav: tuple[str, bytes, str], voice: str
):
    with client_for(demo_frontend) as client:
        heard = client.audio.transcriptions.create(model=MODEL, file=wav, language="en")
        assert heard.usage.input_tokens > 10
        with pytest.raises(openai.BadRequestError, match="audio") as caught:
            client.audio.transcriptions.create(model=MODEL, file=("speech.wav", b"no sound", "audio/wav"))
        assert caught.value.param == "file"
        extra = {"talker": {"temperature": 0, "max_frames": 20}}
        said = client.audio.speech.create(**READ, voice=voice, response_format="pcm", extra_body=extra).content
        assert np.abs(np.frombuffer(said, np.int16)).max() > 100


@pytest.fixture(scope="module")
def guarded(
    null_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FrontendProcess, openai.OpenAI]]:
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "keys").write_text("sesame-1\n")
    options = ["--api-keys-file", str(directory / "keys"), "--workers", "2", "--requests-per-minute", "10"]
    options += ["--triton-metrics-url", null_server.metrics_url]
    with (
        frontend_of(null_server, directory, *options) as frontend,
        openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="sesame-1", max_retries=0) as client,
    ):
        yield frontend, client


def test_keys_workers_and_metrics(
    guarded: tuple[FrontendProcess, openai.OpenAI], voice: str, eventually: Callable[..., None]
):
    frontend, client = guarded
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sesame-2").models.list()
    for _ in range(4):
        assert client.audio.speech.create(**READ, voice=voice, response_format="pcm").content
    wanted = {
        ("answers_total", "finished"): 4,
        ("real_time_factor_count",): 4,
        ("time_to_first_audio_seconds_count",): 4,
        ("tokens_total", "text"): 160,
    }

    def missing() -> list[object]:
        with urllib.request.urlopen(f"{frontend.url}/metrics") as response:
            counted = figures(response.read().decode())
        of_triton = {
            name: any(key[0].startswith(name) for key in counted) for name in ("nv_inference", "omni_sessions")
        }
        lacking = [(key, counted.get(key)) for key, value in wanted.items() if counted.get(key) != value]
        return [*lacking, *(name for name, is_there in of_triton.items() if not is_there)]

    eventually(missing, WITHIN_S)  # an answer is counted when it has left, and a busy Triton's figures may be missing


def test_a_client_that_asks_too_often(guarded: tuple[FrontendProcess, openai.OpenAI]):
    _, client = guarded
    refusals: list[openai.APIStatusError] = []
    while not (refusals and isinstance(refusals[-1], openai.RateLimitError)) and len(refusals) < 200:
        with pytest.raises(openai.APIStatusError) as caught:
            client.audio.speech.create(model=MODEL, input="", voice="")
        refusals.append(caught.value)
    assert {refusal.status_code for refusal in refusals} == {400, 429}
    assert int(refusals[-1].response.headers["retry-after"]) >= 1
