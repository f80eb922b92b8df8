"""Sinks that can be waited for, and small media files."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from triton_omni.errors import OmniError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine, ThinkerEvent, ThinkerRequest
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker

TIMEOUT_S = 240  # the first answer in a form waits for vLLM's imports
_numbers = itertools.count()


class Answered:
    """A sink: keeps the events, wakes who waits, and fails when anything follows the last one."""

    def __init__(self) -> None:
        self.events: list[ThinkerEvent] = []
        self.error: OmniError | None = None
        self.late: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, event: ThinkerEvent | OmniError) -> None:
        with self._changed:
            if self.ended:
                self.late.append(event)
            elif isinstance(event, OmniError):
                self.error = event
            else:
                self.events.append(event)
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        return self.error is not None or bool(self.events and self.events[-1].finish_reason)

    def until(self, condition: Callable[[Answered], bool]) -> Answered:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), TIMEOUT_S), "nothing came in time"
        return self

    def done(self) -> Answered:
        self.until(lambda sink: sink.ended)
        assert not self.late
        return self

    @property
    def ids(self) -> list[int]:
        return [int(i) for event in self.events for i in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1].finish_reason

    @property
    def prompt(self) -> list[int]:
        assert self.events[0].prompt_token_ids is not None
        return [int(i) for i in self.events[0].prompt_token_ids]


def request(content: Any, *, media: tuple[bytes, ...] = (), **changes: Any) -> ThinkerRequest:
    """A user message (or whole ``messages`` when a list of messages); other fields and sampling by name."""
    sampling = {f.name: changes.pop(f.name) for f in dataclasses.fields(ThinkerSampling) if f.name in changes}
    is_messages = isinstance(content, list) and bool(content) and "role" in content[0]
    messages = content if is_messages else [{"role": "user", "content": content}]
    fields = {"request_id": f"r{next(_numbers)}", "messages": messages, "media": media} | changes
    return ThinkerRequest(sampling=ThinkerSampling(**sampling), **fields)


def send(engine: ThinkerEngine, what: ThinkerRequest) -> Answered:
    sink = Answered()
    engine.submit(what, sink)
    return sink


def ask(engine: ThinkerEngine, what: ThinkerRequest) -> Answered:
    return send(engine, what).done()


def start_vllm(model_config: ModelConfig, on_death: Callable[[], None] | None = None, **vllm_args: Any) -> Any:
    """vLLM, float32 and small, 8 at once. Skips the test where vLLM is not installed."""
    pytest.importorskip("vllm", exc_type=ImportError)
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "skip_mm_profiling": True}
    config = ThinkerConfig(
        engine="vllm", dtype="float32", max_num_seqs=8, max_open_requests=32, vllm_args=json.dumps(small | vllm_args)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        return load_thinker(model_config, config, on_death)


@dataclasses.dataclass(frozen=True)
class Media:
    """``frames`` uint8 [4, H, W, 3] at 2 per second are what ``video`` shows; ``track`` is its sound at 16 kHz."""

    audio: bytes
    image: bytes
    video: bytes
    frames: np.ndarray
    track: np.ndarray


def make_media() -> Media:
    rng = np.random.default_rng(5)
    frames = rng.integers(0, 255, (4, 48, 64, 3), dtype=np.uint8)
    track = (rng.normal(0, 0.1, 32_000) * 32_767).astype(np.int16)
    pixels = rng.integers(0, 255, (64, 96, 3), dtype=np.uint8)
    return Media(
        wav(rng.normal(0, 0.1, 20_000)), png(pixels), mkv(frames, track), frames, track.astype(np.float32) / 32_768
    )


def wav(samples: np.ndarray, rate_hz: int = 16_000, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, **({"format": "WAV"} | options))
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def mkv(frames: np.ndarray, track: np.ndarray | None, *, repeat: int = 4) -> bytes:
    """Lossless; every frame shown ``repeat`` times at 8 per second."""
    import av  # late: a GPU machine may lack it

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        video = container.add_stream("ffv1", rate=2 * repeat)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = "bgr0"
        audio = container.add_stream("pcm_s16le", rate=16_000, layout="mono") if track is not None else None
        for frame in np.repeat(frames, repeat, axis=0):
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode(None))
        if audio is not None:
            sound = av.AudioFrame.from_ndarray(track[None], format="s16", layout="mono")
            sound.sample_rate = 16_000
            container.mux(audio.encode(sound))
            container.mux(audio.encode(None))
    return file.getvalue()
