"""Encoded answers are read back by decoders that are not ours."""

from __future__ import annotations

import base64
import io
from itertools import pairwise

import av
import numpy as np
import pytest
import soundfile

from openai_frontend.audio import FORMATS, AudioStream
from openai_frontend.encoders import CODECS, Codec
from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of, events_of
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.media import decode_audio

RATE_HZ = 24_000
SECONDS = np.arange(2 * RATE_HZ) / RATE_HZ
PCM = (np.sin(2 * np.pi * 440 * SECONDS) * 9_000 + np.sin(2 * np.pi * 1_234 * SECONDS) * 5_000).astype(np.int16)
# Encoder delay and padding in milliseconds that a decoder without the file's own account of them keeps.
SLACK_MS = {"wav": 0, "pcm16": 0, "flac": 0, "mp3": 100, "opus": 1, "aac": 100}
LOSSLESS = ("wav", "flac")
# Growing chunks of 80-ms frames, as an answer comes, and one of a single sample.
BORDERS = [0, 1, 4 * 1_920, 12 * 1_920, 20 * 1_920, len(PCM)]
PIECES = [PCM[a:b].tobytes() for a, b in pairwise(BORDERS)]


def read_back(name: str, data: bytes) -> np.ndarray:
    """int16 samples at 24 kHz."""
    if name == "pcm16":
        return np.frombuffer(data, np.int16)
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def same_sound(name: str, got: np.ndarray) -> None:
    assert 0 <= len(got) - len(PCM) <= SLACK_MS[name] * RATE_HZ // 1_000
    if name in LOSSLESS:
        np.testing.assert_array_equal(got, PCM)
    size = 1 << 15
    ours, theirs = (np.abs(np.fft.rfft(wave[4_000 : 4_000 + size] * np.hanning(size))) for wave in (PCM, got))
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(ours)


def test_every_format_is_there():
    assert list(FORMATS) == ["wav", "pcm16", "flac", "mp3", "opus", "aac"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_is_one_file(name):
    encoder = FORMATS[name].stream()
    pieces = [*map(encoder.encode, PIECES), encoder.finish()]
    same_sound(name, read_back(name, b"".join(pieces)))
    assert sum(map(bool, pieces)) >= 4  # it came piece by piece


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_keeps_up_with_the_samples(name):
    """What has come out decodes to all but the last fraction of what went in."""
    encoder = FORMATS[name].stream()
    so_far = b"".join(map(encoder.encode, PIECES))
    assert len(read_back(name, so_far)) > len(PCM) - 0.5 * RATE_HZ


@pytest.mark.parametrize("name", FORMATS)
def test_base64_of_a_stream_may_be_joined(name):
    stream = AudioStream(name)
    text = b"".join([*map(stream.encode, PIECES), stream.finish()])
    same_sound(name, read_back(name, base64.b64decode(text, validate=True)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file(name):
    data = FORMATS[name].whole(PCM.tobytes())
    same_sound(name, read_back(name, data))
    if name in ("wav", "flac"):  # their headers know the length
        assert soundfile.info(io.BytesIO(data)).frames == len(PCM)


@pytest.mark.parametrize("name", FORMATS)
def test_speech_without_samples_is_a_file_without_sound(name):
    encoder = FORMATS[name].stream()
    for data in (FORMATS[name].whole(b""), encoder.encode(b"") + encoder.finish()):
        got = read_back(name, data) if name not in ("wav", "pcm16") else np.frombuffer(data[44:], np.int16)
        assert len(got) <= 0.1 * RATE_HZ
        assert np.abs(got.astype(np.int32)).max(initial=0) < 10


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus", "aac"])
def test_what_we_streamed_can_be_sent_back_to_us(name):
    encoder = FORMATS[name].stream()
    data = b"".join([*map(encoder.encode, PIECES), encoder.finish()])
    got = decode_audio(data, "audio", ThinkerConfig(), rate_hz=16_000, min_samples=201)
    assert 0 <= len(got) - 32_000 <= SLACK_MS[name] * 16 + 2


def test_an_encoder_that_ffmpeg_lacks_is_not_offered():
    assert not Codec("ogg", "no_such_encoder", "s16", "audio/x").available
    assert not Codec("no_such_container", "flac", "s16", "audio/x").available
    assert all(codec.available for codec in CODECS.values())


@pytest.mark.asyncio
@pytest.mark.parametrize("name", FORMATS)
async def test_answers_carry_the_format_asked_for(make_app, chat, name):
    script = [START, *(Delta(audio=piece) for piece in PIECES), END]
    async with client_of(make_app(FakeEngine(*script))) as client:
        whole = await client.post("/v1/chat/completions", json=chat(audio={"format": name}))
        streamed = await client.post("/v1/chat/completions", json=chat(audio={"format": name}, stream=True))
    same_sound(name, read_back(name, base64.b64decode(whole.json()["choices"][0]["message"]["audio"]["data"])))
    deltas = [event["choices"][0]["delta"].get("audio", {}) for event in events_of(streamed)]
    data = "".join(delta.get("data", "") for delta in deltas)
    same_sound(name, read_back(name, base64.b64decode(data, validate=True)))
