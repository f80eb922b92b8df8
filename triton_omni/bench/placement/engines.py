"""The two engines of a measurement, each in a process of its own: how long its steps or calls take under a load."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch

from triton_omni.bench.placement.loads import Load, Pace, Settings, Spans, Times
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.code2wav.factory import load_code2wav
from triton_omni.code2wav.random_weights import random_code2wav
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.errors import OmniError
from triton_omni.pipeline.stages import CodesChunk, Int32
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.factory import load_runner
from triton_omni.talker.measure.sessions import Listener, finish_texts, open_sessions
from triton_omni.talker.runner import PendingFrames


class FrameClock:
    """Notes when the codes of a runner's steps are on the host, and lets code2wav's calls become due."""

    def __init__(self, runner: Any, pace: Pace, chunk_frames: int) -> None:
        self._decode, runner.decode = runner.decode, self._timed_decode
        self._pace, self._chunk_frames = pace, chunk_frames
        self._load: Load | None = None
        self._came_s: list[float] = []
        self._calls_due = 0

    def begin(self, load: Load) -> None:
        """Count the steps of all sessions of ``load`` from now on."""
        self._load, self._came_s, self._calls_due = load, [], 0

    def take(self) -> Spans:
        """From one such step's codes to the next one's."""
        came_s, self._came_s, self._load = self._came_s, [], None
        return list(itertools.pairwise(came_s))

    def _timed_decode(self, slots: list[int], text_ids: list[int], limit: int) -> PendingFrames:
        return _TimedFrames(self._decode(slots, text_ids, limit), self, len(slots))

    def came(self, rows: int) -> None:
        load = self._load
        if load is None or rows != load.sessions:
            return
        self._came_s.append(time.perf_counter())
        calls_due = len(self._came_s) * load.sessions // (load.rows * self._chunk_frames)
        for _ in range(calls_due - self._calls_due):
            self._pace.due.release()
        self._calls_due = calls_due


class _TimedFrames:
    """PendingFrames that tell the clock when they are read."""

    def __init__(self, frames: PendingFrames, clock: FrameClock, rows: int) -> None:
        self._frames, self._clock, self._rows = frames, clock, rows

    def read(self) -> Int32:
        codes = self._frames.read()
        self._clock.came(self._rows)
        return codes


class TalkerSide:
    """The talker's engine, sessions in lockstep, step after step as it does when every session has its text."""

    def __init__(self, settings: Settings, pace: Pace) -> None:
        self._settings = settings
        config = TalkerConfig(
            max_sessions=max(settings.batches),
            max_context=settings.context + settings.frames,
            buckets=settings.batches,
            device=settings.device,
            weights=settings.weights,
        )
        runner = load_runner(settings.model, config)
        self._clock = FrameClock(runner, pace, settings.chunk_frames)
        self._engine = LocalTalkerEngine(runner, config)
        self._listeners: list[Listener] = []

    def prepare(self, load: Load) -> None:
        """Open the sessions and compute their prompts."""
        given = self._settings
        chunks = (1, given.chunk_frames)
        self._listeners = open_sessions(self._engine, given.model, load.sessions, given.context, given.frames, chunks)
        self._clock.begin(load)

    def run(self, load: Load) -> Times:
        began_s = time.perf_counter()
        finish_texts(self._engine, load.sessions)
        for listener in self._listeners:
            listener.ended.wait(max(0.0, began_s + load.limit_s - time.perf_counter()))
        ended_s, spans = time.perf_counter(), self._clock.take()
        for i in range(load.sessions):
            self._engine.cancel(str(i))
        for listener in self._listeners:
            listener.wait()
        return Times(began_s, ended_s, spans)

    def close(self) -> None:
        self._engine.close()


class Code2WavSide:
    """code2wav's engine, whole calls: from codes on the host to samples on the host."""

    def __init__(self, settings: Settings, pace: Pace) -> None:
        self._pace = pace
        self._engine = _code2wav(settings)
        section = settings.model.code2wav
        size = (settings.chunk_frames, section["num_quantizers"])
        self._codes = np.random.default_rng(0).integers(0, section["codebook_size"], size, dtype=np.int32)
        self._groups: list[list[str]] = []

    def prepare(self, load: Load) -> None:
        """Open the sessions, with a call for each group of rows."""
        names = [str(i) for i in range(load.sessions)]
        self._groups = [names[i : i + load.rows] for i in range(0, load.sessions, load.rows)]
        for group in self._groups:
            self._call([CodesChunk(name, self._codes, start=True) for name in group])

    def run(self, load: Load) -> Times:
        chunks = [[CodesChunk(name, self._codes) for name in group] for group in self._groups]
        spans: Spans = []
        began_s = time.perf_counter()
        for number in itertools.islice(self._pace.calls(load.paced), load.calls):
            call_s = time.perf_counter()
            self._call(chunks[number % len(chunks)])
            spans.append((call_s, time.perf_counter()))
        ended_s = time.perf_counter()
        for group in self._groups:
            self._call([CodesChunk(name, self._codes[:0], end=True) for name in group])
        return Times(began_s, ended_s, spans)

    def _call(self, chunks: list[CodesChunk]) -> None:
        for result in self._engine.decode(chunks):
            if isinstance(result, OmniError):
                raise result

    def close(self) -> None:
        self._engine.close()


def _code2wav(settings: Settings) -> StreamingEngine:
    """A checkpoint's engine as it is served; on random weights one with no other graphs than are measured."""
    sessions = max(settings.batches)
    config = Code2WavConfig(max_sessions=sessions, device=settings.device, weights=settings.weights)
    device = config.torch_device()
    if settings.weights == "checkpoint" or device.type == "cpu":
        return load_code2wav(settings.model, config)
    from triton_omni.code2wav.buckets import Bucket
    from triton_omni.code2wav.fused import FusedDecoder  # late: triton comes with CUDA builds of torch only
    from triton_omni.code2wav.graphs import FusedRunner
    from triton_omni.code2wav.packing import PackedCode2Wav

    shape = Code2WavShape.from_config(settings.model.code2wav)
    shapes = [Bucket(rows, settings.chunk_frames) for rows in settings.batches]
    packed = PackedCode2Wav(random_code2wav(shape, device, slots=1), config.torch_dtype(device), device)
    torch.cuda.empty_cache()
    runner = FusedRunner(FusedDecoder(packed, sessions + 1, shapes), cuda_graph=True)
    return StreamingEngine(runner, max_sessions=sessions, idle_timeout_s=config.idle_timeout_s)


def device_name(device: str) -> str:
    """The GPU that engines for ``device`` work on, "none" on CPU."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else "none"


SIDES: dict[str, type[TalkerSide | Code2WavSide]] = {"talker": TalkerSide, "code2wav": Code2WavSide}
