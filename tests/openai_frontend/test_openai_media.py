"""Media in and encoded speech out through the ``openai`` client and the running stack."""

from __future__ import annotations

import base64
import io
import json
import urllib.request

import av
import numpy as np
import openai
import pytest

from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.test_audio import read_back
from tests.openai_frontend.test_vllm_omni import BENCH_HEADERS, bench_body, measure
from triton_omni.serve.frontend import FrontendProcess

pytestmark = pytest.mark.triton
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "modalities": ["text", "audio"]}


@pytest.mark.parametrize("name", ["flac", "mp3", "opus", "aac"])
def test_encoded_speech_sounds_as_the_samples(client: openai.OpenAI, name: str):
    def file_of(audio_format: str) -> bytes:
        options = {"audio": {"voice": "ethan", "format": audio_format}, "stream": True}
        stream = client.chat.completions.create(**SHORT, **options)
        deltas = [chunk.choices[0].delta.to_dict().get("audio") or {} for chunk in stream]
        return base64.b64decode("".join(delta.get("data") or "" for delta in deltas))

    pcm = np.frombuffer(file_of("pcm16"), np.int16)
    got = read_back(name, file_of(name))
    assert 0 <= len(got) - len(pcm) < 2_400
    if name == "flac":
        np.testing.assert_array_equal(got, pcm)
    peaks = [np.abs(np.fft.rfft(wave[4_800:28_800])).argmax() for wave in (pcm, got)]
    assert abs(peaks[0] - peaks[1]) <= 2


def test_a_conversation_names_its_former_answer(client: openai.OpenAI):
    answer = client.chat.completions.create(**SHORT, audio={"voice": "ethan", "format": "mp3"}).choices[0].message
    messages = [*HELLO, {"role": "assistant", "audio": {"id": answer.audio.id}}, *HELLO]
    assert client.chat.completions.create(**{**SHORT, "messages": messages}).choices[0].finish_reason
    messages[1]["audio"]["id"] = "audio-0"
    with pytest.raises(openai.BadRequestError, match="audio-0") as caught:
        client.chat.completions.create(**{**SHORT, "messages": messages})
    assert caught.value.param == "messages[1].audio.id"


def test_the_bench_s_client(null_frontend: FrontendProcess):
    body = json.dumps(bench_body(max_tokens=6)).encode()
    headers = BENCH_HEADERS | {"content-type": "application/json"}
    request = urllib.request.Request(f"{null_frontend.url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        result = measure(response.read().decode())
    assert result.text == "w0 w1 w2 w3 w4 w5 "
    assert sum(result.tokens) == result.output_tokens == 6
    assert result.audio_duration_s > 1
    assert result.finish == ["length"]


def sound(container_format: str, codec: str, picture: bool = False) -> bytes:
    """One second of a tone, in a video of two grey pictures where asked."""
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=48_000, layout="mono")
        shown = container.add_stream("libx264", rate=2, options={"preset": "ultrafast"}) if picture else None
        tone = (np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000) * 16_000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
        frame.sample_rate = 48_000
        if shown is not None:
            shown.width, shown.height, shown.pix_fmt = 64, 48, "yuv420p"
            for _ in range(2):
                grey = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 128, np.uint8), format="rgb24")
                container.mux(shown.encode(grey))
            container.mux(shown.encode(None))
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def prompt_tokens(demo: openai.OpenAI, part: dict, **extra: object) -> int:
    content = [part, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    answer = demo.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=extra)
    return answer.usage.prompt_tokens


@pytest.mark.parametrize(("name", "container_format", "codec"), [("m4a", "ipod", "aac"), ("webm", "webm", "libopus")])
def test_phones_and_browsers_recordings(demo: openai.OpenAI, name: str, container_format: str, codec: str):
    data = base64.b64encode(sound(container_format, codec)).decode()
    tokens = prompt_tokens(demo, {"type": "input_audio", "input_audio": {"data": data, "format": name}})
    silent = prompt_tokens(demo, {"type": "text", "text": ""})
    assert 10 <= tokens - silent <= 20  # a token of sound is 80 ms, and two that enclose it


def test_the_sound_of_a_video_is_heard_where_asked(demo: openai.OpenAI):
    url = f"data:video/mp4;base64,{base64.b64encode(sound('mp4', 'aac', picture=True)).decode()}"
    part = {"type": "video_url", "video_url": {"url": url}}
    seen, heard = (
        prompt_tokens(demo, part, mm_processor_kwargs={"use_audio_in_video": wanted}) for wanted in (False, True)
    )
    assert heard > seen
