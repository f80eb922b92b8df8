"""A client that reads streams as vLLM-Omni's bench does, and measures by its definitions."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import wave
from typing import Any

import numpy as np
import pytest

from openai_frontend.engine import Delta
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, USAGE, FakeEngine, client_of
from triton_omni.errors import StageError

pytestmark = pytest.mark.asyncio
PCM = np.random.default_rng(0).integers(-30_000, 30_000, 9_600, dtype=np.int16)


def text(delta: str, tokens: int) -> Delta:
    return Delta(text=delta, event={"usage": {"text_tokens": tokens}})


SCRIPT = (
    *(START, text("One ", 1), Delta(audio=PCM[:1_000].tobytes()), text("two three ", 3)),
    *(Delta(audio=PCM[1_000:].tobytes()), END),
)
BENCH_HEADERS = {"x-request-id": "bench-1a2b3c4d-7", "authorization": "Bearer none"}


def bench_body(**extra: Any) -> dict[str, Any]:
    """What the bench posts; ``extra`` is its --extra_body."""
    content = [{"type": "text", "text": "Hello"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0.0, "max_tokens": 2048}
    return body | {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **extra,
    }


@dataclasses.dataclass
class Measured:
    """One request as the bench counts it; an event's time is its place in the stream."""

    text: str = ""
    pcm: bytes = b""
    ttft: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)  # that each text event added
    audio_ttfp: int | None = None
    audio_end: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: list[str] = dataclasses.field(default_factory=list)
    error: Any = None

    @property
    def audio_duration_s(self) -> float:
        return len(self.pcm) / 2 / 24_000


def measure(stream: str) -> Measured:
    result, counted = Measured(), 0
    *events, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line and not line.startswith(":")]
    assert done == "[DONE]"
    for at, event in enumerate(map(json.loads, events)):
        if "error" in event:
            result.error = event["error"]
            continue
        usage = event.get("usage") or {}
        for choice in event["choices"]:
            content = choice["delta"].get("content")
            result.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            if event["modality"] == "text":
                added = usage["completion_tokens"] - counted
                if added > 0:
                    counted += added
                    result.tokens.append(added)
                    result.ttft = at if result.ttft is None else result.ttft
                result.text += content or ""
            elif event["modality"] == "audio" and content:
                result.audio_ttfp = at if result.audio_ttfp is None else result.audio_ttfp
                result.audio_end = at
                with wave.open(io.BytesIO(base64.b64decode(content, validate=True))) as file:
                    assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
                    result.pcm += file.readframes(file.getnframes())
        if not event["choices"]:
            result.prompt_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return result


async def run(make_app, body, headers=None, script=SCRIPT) -> tuple[Measured, FakeEngine]:
    engine = FakeEngine(*script)
    async with client_of(make_app(engine)) as client:
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return measure(response.text), engine


@pytest.mark.parametrize(
    ("extra", "headers"),
    [
        ({}, BENCH_HEADERS),
        ({"modalities": ["text", "audio"]}, BENCH_HEADERS),
        ({"audio": {"dialect": "vllm-omni"}}, None),
        ({"audio": {"format": "wav"}}, BENCH_HEADERS),
    ],
)
async def test_the_bench_reads_our_streams(make_app, extra, headers):
    result, engine = await run(make_app, bench_body(**extra), headers)
    assert engine.request["modalities"] == ["text", "audio"]
    assert engine.request["continuous_usage"] is True
    assert result.text == "One two three "
    assert result.tokens == [1, 2]
    assert result.pcm == PCM.tobytes()
    assert result.audio_duration_s == 0.4
    assert result.ttft < result.audio_ttfp < result.audio_end
    assert (result.prompt_tokens, result.output_tokens) == (USAGE["prompt_tokens"], USAGE["text_tokens"])
    assert result.finish == ["stop"]


async def test_text_alone(make_app):
    result, engine = await run(make_app, bench_body(modalities=["text"]), BENCH_HEADERS)
    assert engine.request["modalities"] == ["text"]
    assert (result.text, result.pcm, result.audio_ttfp, result.finish) == ("One two three ", b"", None, ["stop"])


async def test_speech_alone_has_no_text(make_app):
    result, _ = await run(make_app, bench_body(modalities=["audio"]), BENCH_HEADERS)
    assert (result.text, result.ttft, result.pcm) == ("", None, PCM.tobytes())


async def test_what_its_data_sets_add_is_ignored_in_its_dialect_only(make_app, chat):
    seed_tts = {"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "x", "task_type": "Base", "language": "English"}
    more = {"max_new_tokens": 9, "ignore_eos": True, "return_stage_metrics": True}
    result, _ = await run(make_app, bench_body(**seed_tts, **more), BENCH_HEADERS)
    assert result.pcm == PCM.tobytes()
    async with client_of(make_app(FakeEngine(*SCRIPT))) as client:
        response = await client.post("/v1/chat/completions", json=chat(**seed_tts))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "ref_audio"


async def test_an_error_in_the_stream(make_app):
    broken = (*SCRIPT[:3], StageError("talker", "gone"))
    result, _ = await run(make_app, bench_body(), BENCH_HEADERS, broken)
    assert "gone" in result.error["message"]
    assert result.finish == []


@pytest.mark.parametrize(
    ("headers", "changes"),
    [
        (None, {}),
        ({"x-request-id": "mine"}, {}),
        (BENCH_HEADERS, {"stream_options": {"include_usage": True}}),  # vLLM's own bench, which knows text alone
        (BENCH_HEADERS, {"audio": {"dialect": "openai"}}),
    ],
)
async def test_others_get_openai_s_streams(make_app, headers, changes):
    body = bench_body(modalities=["text", "audio"]) | changes
    engine = FakeEngine(*SCRIPT)
    async with client_of(make_app(engine)) as client:
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
    deltas = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    content = "".join(c["delta"].get("content") or "" for event in deltas for c in event["choices"])
    assert content == "One two three "


async def test_usage_in_every_chunk_of_openai_s_streams(make_app, chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(stream=True, stream_options=options, modalities=["text", "audio"])
    async with client_of(make_app(FakeEngine(*SCRIPT))) as client:
        response = await client.post("/v1/chat/completions", json=body)
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    totals = [event["usage"]["completion_tokens"] for event in events]
    # Opening; one token; one frame begun; two tokens; five frames. Then the end event's own counts.
    assert totals == [0, 1, 2, 4, 8] + [USAGE["completion_tokens"]] * 3
    assert all(event["usage"]["prompt_tokens"] == 7 for event in events[1:])
