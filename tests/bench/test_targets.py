"""Pieces of each dialect, as the client takes them."""

from __future__ import annotations

import base64
import io
import wave

import pytest

from openai_frontend.audio import wav_file, wav_header
from triton_omni.bench.http_target import _Lines, audio_length_s, take_chunk
from triton_omni.bench.record import Recorder


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("samples", [1, 2, 3, 24_000, 123_457])
def test_the_length_of_a_piece_is_exact(samples):
    pcm = bytes(2 * samples)
    assert audio_length_s(b64(pcm)) == samples / 24_000
    assert audio_length_s(b64(wav_file(pcm))) == samples / 24_000
    assert audio_length_s(b64(wav_header(None) + pcm)) == samples / 24_000


def test_a_file_of_another_rate_and_shape():
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((2, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(bytes(4 * 8_000))
    assert audio_length_s(b64(file.getvalue())) == 0.5


def test_what_is_no_base64():
    with pytest.raises(ValueError):
        audio_length_s("?")


def test_lines_that_come_in_pieces():
    lines = _Lines()
    taken = [line for piece in (b"da", b"ta: 1", b"\n\ndata: 2\nda", b"ta: 3\n") for line in lines.take(piece)]
    assert taken == [b"data: 1", b"", b"data: 2", b"data: 3"]


def chunk(delta, modality, **usage):
    return {"modality": modality, "choices": [{"index": 0, "delta": delta}], **({"usage": usage} if usage else {})}


SECOND = b64(bytes(48_000))
OPENAI = (
    chunk({"role": "assistant", "content": ""}, "text", prompt_tokens=7, completion_tokens=0),
    chunk(
        {"content": "a", "audio": {"id": "x", "transcript": "a"}}, "text", completion_tokens_details={"text_tokens": 1}
    ),
    chunk({"audio": {"data": SECOND}}, "audio", completion_tokens_details={"text_tokens": 1}),
    chunk({"content": "b c", "audio": {"transcript": "b c"}}, "text", completion_tokens_details={"text_tokens": 3}),
    chunk({"audio": {"expires_at": 1}}, "audio"),
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 17, "completion_tokens_details": {"text_tokens": 4}},
    },
)
VLLM_OMNI = (
    chunk({"role": "assistant", "content": ""}, "text", prompt_tokens=7, completion_tokens=0),
    chunk({"content": "a"}, "text", prompt_tokens=7, completion_tokens=1),
    chunk(
        {"role": "assistant", "content": b64(wav_file(bytes(48_000)))}, "audio", prompt_tokens=7, completion_tokens=0
    ),
    chunk({"content": "b c"}, "text", prompt_tokens=7, completion_tokens=3),
    chunk({"content": ""}, "audio", prompt_tokens=7, completion_tokens=0),
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}},
)


@pytest.mark.parametrize("chunks", [OPENAI, VLLM_OMNI])
def test_both_dialects_tell_the_same(chunks):
    answer = Recorder(0.0)
    for now_s, each in enumerate(chunks):
        take_chunk(each, float(now_s), answer)
    answer.ended = True
    record = answer.close(6.0, wants_text=True, wants_audio=True)
    assert record.error is None
    assert record.text == ((1.0, 1), (3.0, 2))
    assert record.audio == ((2.0, 1.0),)
    assert (record.prompt_tokens, record.text_tokens) == (7, 4)


def test_an_error_in_the_stream():
    answer = Recorder(0.0)
    take_chunk({"error": {"message": "talker: gone"}}, 1.0, answer)
    assert answer.error == "talker: gone"
