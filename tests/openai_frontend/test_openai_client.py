"""The ``openai`` client against the running stack: frontend, tritonserver and its four models."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import openai
import pytest
import soundfile

from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import WITHIN_S
from tests.triton.client import gauges, open_sessions
from triton_omni.model_config import ModelConfig
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"model": MODEL, "messages": HELLO, "max_tokens": 6}
SPOKEN = {"modalities": ["text", "audio"]}
TEXT = "w0 w1 w2 w3 w4 w5 "
GREEDY = {"max_tokens": 20, "temperature": 0, "extra_body": {"talker": {"temperature": 0, "max_frames": 40}}}


def async_client_for(frontend: FrontendProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def voices(checkpoint) -> list[str]:
    return list(ModelConfig.load(checkpoint).speakers)


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


def test_a_streams_samples_are_the_whole_answers_wav(client: openai.OpenAI, voices: list[str]):
    whole = client.chat.completions.create(**SHORT, **SPOKEN, audio={"voice": voices[-1], "format": "wav"})
    message = whole.choices[0].message
    assert len(whole.choices) == 1
    assert (message.content, message.audio.transcript) == (TEXT, TEXT)
    frames = whole.usage.completion_tokens_details.audio_tokens
    pcm = pcm_of(message.audio)
    assert len(pcm) == 2 * (frames * 1_920 - 555)
    assert np.abs(np.frombuffer(pcm, np.int16)).max() > 1_000
    stream = client.chat.completions.create(
        **SHORT, **SPOKEN, stream=True, audio={"voice": voices[0].upper(), "format": "pcm16"}
    )
    assert spoken(list(stream)) == (TEXT, pcm)


def test_the_clients_own_accumulator(client: openai.OpenAI):
    options = {"stream_options": {"include_usage": True}, "audio": {"voice": "Ethan", "format": "wav"}}
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
def test_errors(client: openai.OpenAI, voices: list[str], stream: bool):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=HELLO, stream=stream)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match=", ".join(voices)) as voice:
        create(**SHORT, audio={"voice": "nobody", "format": "wav"}, stream=stream)
    assert voice.value.param == "audio.voice"
    with pytest.raises(openai.BadRequestError) as extra:
        create(**SHORT, extra_body={"top_q": 1}, stream=stream)
    assert extra.value.param == "top_q"
    with pytest.raises(openai.BadRequestError) as content:
        create(model=MODEL, messages=[{"role": "user", "content": 5}], stream=stream)
    assert content.value.param == "messages[0].content"


def test_models(client: openai.OpenAI, voices: list[str]):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL
    assert sorted(model.to_dict()["voices"]) == sorted(voices)


@pytest.mark.asyncio
async def test_many_at_once(null_frontend: FrontendProcess):
    async with async_client_for(null_frontend) as client:

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
async def test_leaving_frees_every_stage(
    tight_frontend: FrontendProcess, tight_server: TritonServer, eventually, stream: bool
):
    def cancelled() -> float:
        return gauges(tight_server)["omni_bls", "cancelled"]

    before = cancelled()
    async with async_client_for(tight_frontend) as client:

        async def listen() -> None:
            answer = await client.chat.completions.create(model=MODEL, messages=HELLO, **SPOKEN, stream=stream)
            async for _ in answer:
                pass

        listening = asyncio.ensure_future(listen())
        try:
            for stage in ("code2wav", "talker"):
                running = stage, "running"
                await asyncio.to_thread(eventually, lambda key=running: gauges(tight_server)[key] != 1, WITHIN_S)
        finally:
            listening.cancel()
        await asyncio.to_thread(eventually, lambda: open_sessions(tight_server), WITHIN_S)
        await asyncio.to_thread(eventually, lambda: cancelled() != before + 1, WITHIN_S)
        assert (await client.chat.completions.create(**SHORT)).choices[0].message.content == TEXT


def test_the_demo_model_speaks_the_same_whole_and_streamed(demo: openai.OpenAI, voices: list[str]):
    options = {"model": MODEL, "messages": HELLO, **SPOKEN, **GREEDY}
    whole = demo.chat.completions.create(**options, audio={"voice": voices[0], "format": "wav"})
    pcm = pcm_of(whole.choices[0].message.audio)
    assert np.sqrt(np.mean((np.frombuffer(pcm, np.int16) / 32_768) ** 2)) > 0.01
    stream = demo.chat.completions.create(**options, audio={"voice": voices[0], "format": "pcm16"}, stream=True)
    assert spoken(list(stream)) == (whole.choices[0].message.content, pcm)


def test_speech_begins_before_the_text_has_ended(demo: openai.OpenAI):
    """The text would go on as long as the context has room."""
    extra = GREEDY["extra_body"] | {"ignore_eos": True}
    options = {**SPOKEN, "temperature": 0, "max_tokens": 3_000, "extra_body": extra, "stream": True}
    with demo.chat.completions.create(model=MODEL, messages=HELLO, **options) as stream:
        deltas = (chunk.choices[0].delta for chunk in stream)
        assert any(delta.audio and delta.audio.data for delta in deltas)
        assert any(delta.content for delta in deltas)


def silence(samples: int) -> bytes:
    wav = io.BytesIO()
    soundfile.write(wav, np.zeros(samples), 16_000, format="WAV")
    return wav.getvalue()


@pytest.mark.parametrize(
    ("content", "kind", "told"),
    [
        pytest.param(b"not an image", "image", "image", id="no image"),
        pytest.param(b"\x89PNG\r\n\x1a\n cut off", "image", "image", id="image cut off"),
        pytest.param(b"not a sound", "audio", "audio", id="no audio"),
        pytest.param(silence(100)[:20], "audio", "audio", id="audio cut off"),
        pytest.param(silence(0), "audio", "0 samples", id="no samples"),
    ],
)
def test_media_that_cannot_be_read(demo: openai.OpenAI, content: bytes, kind: str, told: str):
    url = f"data:{kind}/x;base64,{base64.b64encode(content).decode()}"
    parts = [{"type": "text", "text": "What is it?"}, {"type": f"{kind}_url", f"{kind}_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        demo.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert caught.value.param == "messages[0].content[1]"


def test_a_prompt_longer_than_the_context(demo: openai.OpenAI, checkpoint):
    words = "sea " * ModelConfig.load(checkpoint).context_tokens
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        demo.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": words}])
    assert caught.value.param == "messages"
