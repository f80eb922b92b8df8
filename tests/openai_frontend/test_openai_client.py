"""The ``openai`` client against the running stack: frontend, tritonserver and its four models (null engines)."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile

from triton_omni.model_config import ModelConfig
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.repository import render
from triton_omni.serve.tritonserver import TritonServer, free_ports

pytestmark = pytest.mark.triton
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
# Answers last four seconds unless max_tokens ends them: time enough to leave in the middle.
NULL_ENGINES = {
    "thinker": {"engine": "null", "null_answer_tokens": "400"},
    "talker": {"engine": "null"},
    "code2wav": {"engine": "null"},
}
MODEL = "omni"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"model": MODEL, "messages": HELLO, "max_tokens": 6}
SPOKEN = {"modalities": ["text", "audio"]}
TEXT = "w0 w1 w2 w3 w4 w5 "


@dataclasses.dataclass(frozen=True)
class Stack:
    url: str
    metrics_url: str
    voices: list[str]

    def metric(self, pattern: str) -> float:
        """The sum of all metrics whose name and labels match."""
        with urllib.request.urlopen(self.metrics_url) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))

    def open_sessions(self) -> float:
        return self.metric(r'omni_sessions\{.*state="(running|waiting|sessions)"')


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    repository = render(REPOSITORY, directory / "models", NULL_ENGINES)
    (port,) = free_ports(1)
    with TritonServer(repository, checkpoint=checkpoint, log_path=directory / "tritonserver.log") as server:
        server.wait_ready(180)
        arguments = ["--port", str(port), "--triton-url", server.grpc_target, "--model-name", MODEL]
        arguments += ["--checkpoint", str(checkpoint), "--drain-s", "2"]
        url = f"http://127.0.0.1:{port}"
        with FrontendProcess(url, arguments, log_path=directory / "frontend.log", drain_s=2) as frontend:
            frontend.wait_ready(60)
            yield Stack(url, server.metrics_url, list(ModelConfig.load(checkpoint).speakers))


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def async_client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0)


def pcm_of(audio: openai.types.chat.ChatCompletionAudio) -> bytes:
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="int16")
    assert rate_hz == 24_000
    return samples.tobytes()


def spoken(chunks) -> tuple[str, bytes]:
    """Content and samples of a stream's chunks."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    audio = [delta.audio for delta in deltas if delta.audio is not None]
    text = "".join(delta.content or "" for delta in deltas)
    return text, b"".join(base64.b64decode(piece.data) for piece in audio if piece.data)


def test_a_streams_samples_are_the_whole_answers_wav(client: openai.OpenAI, stack: Stack):
    whole = client.chat.completions.create(**SHORT, **SPOKEN, audio={"voice": stack.voices[-1], "format": "wav"})
    message = whole.choices[0].message
    assert len(whole.choices) == 1
    assert (message.content, message.audio.transcript) == (TEXT, TEXT)
    frames = whole.usage.completion_tokens_details.audio_tokens
    pcm = pcm_of(message.audio)
    assert len(pcm) == 2 * (frames * 1_920 - 555)
    assert np.abs(np.frombuffer(pcm, np.int16)).max() > 1_000
    stream = client.chat.completions.create(**SHORT, **SPOKEN, stream=True, audio={"voice": "ETHAN", "format": "pcm16"})
    assert spoken(list(stream)) == (TEXT, pcm)


def test_speech_begins_before_the_text_has_ended(client: openai.OpenAI):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "stream": True}
    chunks = list(client.chat.completions.create(**options, **SPOKEN))
    kinds = ["audio" if c.choices[0].delta.audio and c.choices[0].delta.audio.data else "text" for c in chunks]
    last_text = max(i for i, chunk in enumerate(chunks) if chunk.choices[0].delta.content)
    assert "audio" in kinds[:last_text]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_clients_own_accumulator(client: openai.OpenAI):
    options = {"stream_options": {"include_usage": True}, "audio": {"voice": "ethan", "format": "wav"}}
    with client.chat.completions.stream(**SHORT, **SPOKEN, **options) as stream:
        for _ in stream:
            pass
        answer = stream.current_completion_snapshot
    message = answer.choices[0].message
    assert (message.role, message.content, message.audio.transcript) == ("assistant", TEXT, TEXT)
    assert message.audio.id.startswith("audio-")
    assert len(pcm_of(message.audio)) == 2 * (answer.usage.completion_tokens_details.audio_tokens * 1_920 - 555)
    assert answer.usage.completion_tokens_details.text_tokens == 6


def test_text_alone(client: openai.OpenAI):
    answer = client.chat.completions.create(**SHORT)
    assert (answer.choices[0].message.content, answer.choices[0].message.audio) == (TEXT, None)
    assert answer.usage.completion_tokens == 6
    assert answer._request_id


def test_an_answer_goes_back_as_history(client: openai.OpenAI):
    for modalities in (["text"], ["audio"], ["text", "audio"]):
        message = client.chat.completions.create(**SHORT, modalities=modalities).choices[0].message
        options = SHORT | {"messages": [*HELLO, message, *HELLO]}
        assert client.chat.completions.create(**options).choices[0].message.content == TEXT


def test_media_reach_the_model(client: openai.OpenAI):
    wav = io.BytesIO()
    soundfile.write(wav, np.zeros(1_600), 16_000, format="WAV")
    data = base64.b64encode(wav.getvalue()).decode()
    parts = [
        {"type": "text", "text": "What do you hear?"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ]
    options = SHORT | {"messages": [{"role": "user", "content": parts}]}
    answer = client.chat.completions.create(**options, **SPOKEN)
    assert answer.choices[0].message.content == TEXT
    assert pcm_of(answer.choices[0].message.audio)


@pytest.mark.parametrize("stream", [False, True])
def test_errors(client: openai.OpenAI, stack: Stack, stream: bool):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=HELLO, stream=stream)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match=", ".join(stack.voices)) as voice:
        create(**SHORT, audio={"voice": "nobody", "format": "wav"}, stream=stream)
    assert voice.value.param == "audio.voice"
    with pytest.raises(openai.BadRequestError) as extra:
        create(**SHORT, extra_body={"top_q": 1}, stream=stream)
    assert extra.value.param == "top_q"
    with pytest.raises(openai.BadRequestError) as content:
        create(model=MODEL, messages=[{"role": "user", "content": 5}], stream=stream)
    assert content.value.param == "messages[0].content"


def test_models(client: openai.OpenAI, stack: Stack):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL
    assert sorted(model.to_dict()["voices"]) == sorted(stack.voices)


@pytest.mark.asyncio
async def test_many_at_once(stack: Stack):
    async with async_client(stack) as client:

        async def streamed() -> tuple[str, bytes]:
            stream = await client.chat.completions.create(**SHORT, **SPOKEN, stream=True)
            return spoken([chunk async for chunk in stream])

        async def whole() -> tuple[str, bytes]:
            message = (await client.chat.completions.create(**SHORT, **SPOKEN)).choices[0].message
            return message.content, pcm_of(message.audio)

        answers = await asyncio.gather(*(ask() for ask in (streamed, whole) for _ in range(8)))
    assert len(set(answers)) == 1
    assert answers[0][0] == TEXT


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_every_stage(stack: Stack, stream: bool):
    cancelled = r'omni_requests_total\{.*outcome="cancelled"'
    before = stack.metric(cancelled)
    async with async_client(stack) as client:

        async def listen() -> None:
            answer = await client.chat.completions.create(model=MODEL, messages=HELLO, **SPOKEN, stream=stream)
            async for _ in answer:
                pass

        listening = asyncio.ensure_future(listen())
        await reaches(lambda: stack.open_sessions() >= 4)  # in omni_bls and in each stage
        left = time.monotonic()
        listening.cancel()
        await reaches(lambda: stack.open_sessions() == 0 and stack.metric(cancelled) == before + 1)
        assert time.monotonic() - left < 2
        assert (await client.chat.completions.create(**SHORT)).choices[0].message.content == TEXT


async def reaches(condition, timeout_s: float = 10) -> None:
    """Return when ``condition`` holds; the metrics it reads change four times a second."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)
