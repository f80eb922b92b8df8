"""Sessions of the engine, in lockstep and as they arrive, and what they waited for."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import CodesEvent, Int32, TalkerStart
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.runner import PendingFrames
from triton_omni.talker.session import Session

FRAME_S = 0.08
TEXT_TOKENS, TOKEN_S = 40, 0.012

Row = dict[str, Any]


@dataclasses.dataclass
class Step:
    """A decode step of ``rows``; when it began and ended, in ms of one clock."""

    rows: int
    begin_ms: float = 0.0
    end_ms: float = 0.0


class StepClock:
    """Times the decode steps of a runner: by CUDA events around each replay, on CPU by the host's clock."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._on_gpu = runner, runner.slots.device.type == "cuda"
        self._events: list[tuple[int, Any, Any]] = []
        self._steps: list[Step] = []
        self._rows = 0
        self._decode = runner.decode
        runner.decode = self._timed_decode
        if hasattr(runner, "replay"):
            self._replay, runner.replay = runner.replay, self._timed_replay

    def _timed_decode(self, slots: Sequence[int], text_ids: Sequence[int], limit: int) -> PendingFrames:
        self._rows = len(slots)
        began_s = time.perf_counter()
        frames: PendingFrames = self._decode(slots, text_ids, limit)
        if not self._on_gpu:
            self._steps.append(Step(len(slots), began_s * 1e3, time.perf_counter() * 1e3))
        return frames

    def _timed_replay(self, bucket: int) -> None:
        begin, end = cuda_event(), cuda_event()
        begin.record()
        self._replay(bucket)
        end.record()
        self._events.append((self._rows, begin, end))

    def take(self) -> list[Step]:
        """The steps since the last call."""
        if self._events:
            torch.cuda.synchronize()
            first = self._events[0][1]
            self._steps = [Step(n, first.elapsed_time(b), first.elapsed_time(e)) for n, b, e in self._events]
        steps, self._steps, self._events = self._steps, [], []
        return steps


class Listener:
    """A sink that knows when its session began to speak and when it ended."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_s = self.ended_s = 0.0
        self.frames = 0
        self.failure: Exception | None = None
        self.speaks, self.ended = threading.Event(), threading.Event()

    def __call__(self, event: Any) -> None:
        now_s = time.perf_counter()
        if isinstance(event, CodesEvent):
            self.frames += len(event.codes)
        else:
            self.failure = event
        if not self.speaks.is_set():
            self.first_s = now_s
            self.speaks.set()
        if self.failure is not None or event.finish_reason is not None:
            self.ended_s = now_s
            self.ended.set()

    def wait(self) -> None:
        self.ended.wait()
        if self.failure is not None:
            raise self.failure


def cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def start_of(model: ModelConfig, rows: int, frames: int, seed: int, chunks: tuple[int, ...]) -> TalkerStart:
    """A session of exactly ``frames`` frames behind a prompt of ``rows`` rows; one text token, more to come."""
    raw = model.raw
    head = [raw["im_start_token_id"], raw["user_token_id"], 10]
    tail = [raw["im_start_token_id"], raw["assistant_token_id"], 10]
    text = np.random.default_rng(seed).integers(20, 250, max(1, rows - len(head) - 8)).tolist()
    return TalkerStart(
        prompt_token_ids=np.array([*head, *text, *tail], np.int32),
        speaker=model.default_speaker,
        sampling=TalkerSampling(max_frames=frames, min_frames=frames, seed=seed),
        chunk_frames=chunks,
        token_ids=np.array([20], np.int32),
    )


def open_sessions(
    engine: LocalTalkerEngine, model: ModelConfig, batch: int, context: int, frames: int, chunks: tuple[int, ...]
) -> list[Listener]:
    """Sessions "0", "1" …, each with its first frame made and waiting for text, ``context`` rows in the middle of its
    ``frames`` frames.
    """
    listeners = []
    for i in range(batch):
        listeners.append(Listener())
        engine.start(str(i), start_of(model, context - frames // 2, frames, seed=i, chunks=chunks), listeners[-1])
    for listener in listeners:
        listener.speaks.wait()
    return listeners


def finish_texts(engine: LocalTalkerEngine, batch: int) -> None:
    """The end of the text for the sessions of ``open_sessions``, and no step before all of them have it."""
    with engine._changed:
        for i in range(batch):
            engine.append(str(i), np.empty(0, np.int32), True)


def lockstep(
    engine: LocalTalkerEngine, model: ModelConfig, clock: StepClock, batch: int, context: int, frames: int
) -> Row:
    """``batch`` sessions that all have their text, around ``context`` rows."""
    listeners = open_sessions(engine, model, batch, context, frames, chunks=(1, frames))
    clock.take()
    finish_texts(engine, batch)
    for listener in listeners:
        listener.wait()
    steps = [step for step in clock.take() if step.rows == batch][1:]
    pairs = list(itertools.pairwise(steps))
    periods_ms = [after.end_ms - before.end_ms for before, after in pairs]
    gaps_us = [1e3 * (after.begin_ms - before.end_ms) for before, after in pairs]
    median_ms = statistics.median(periods_ms)
    return {
        "batch": batch,
        "context": context,
        "ms_per_frame": round(median_ms, 3),
        "p99_ms": round(float(np.percentile(periods_ms, 99)), 3),
        "step_ms": round(statistics.median(step.end_ms - step.begin_ms for step in steps), 3),
        "idle_gap_us": round(statistics.median(gaps_us), 1),
        "frames_per_s": round(1e3 * batch / median_ms, 1),
        "memory_gib": used_gib(),
    }


def used_gib() -> float | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 2)


class WatchedEngine(LocalTalkerEngine):
    """Counts the steps that leave without a session which has text, and how long it waits for the launch."""

    def __init__(self, runner: Any, config: TalkerConfig) -> None:
        self.launches = 0
        self.since: dict[str, tuple[int, float]] = {}
        self.waited_steps: list[int] = []
        self.waited_ms: list[float] = []
        super().__init__(runner, config)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        with self._changed:
            session = self._sessions.get(session_id)
            if session is not None and session.frames and not session.text.has_next:
                self.since[session_id] = (self.launches, time.perf_counter())
        super().append(session_id, token_ids, text_finished)

    def _decode(self, batch: list[tuple[Session, int]]) -> PendingFrames:
        for session, _ in batch:
            launches, since_s = self.since.pop(session.session_id, (None, 0.0))
            if launches is not None:
                # and one more where a step is still in flight
                self.waited_steps.append(self.launches - launches + self._steps_ahead)
                self.waited_ms.append(1e3 * (time.perf_counter() - since_s))
        self.launches += 1
        return super()._decode(batch)


def arrivals(
    engine: WatchedEngine, model: ModelConfig, requests: int, concurrency: int, frames: int, max_rows: int
) -> Row:
    """``requests`` sessions, at most ``concurrency`` at once, that come at random and get a token each 12 ms."""
    random = np.random.default_rng(0)
    room = threading.Semaphore(concurrency)
    listeners: list[Listener] = []
    feeders = []
    began_s = time.perf_counter()
    for i in range(requests):
        room.acquire()
        time.sleep(float(random.exponential(0.01)))  # the arrivals themselves
        rows = int(random.integers(30, max_rows))
        listener = Listener()
        listeners.append(listener)
        engine.start(str(i), start_of(model, rows, frames, seed=i, chunks=(4, 8, 16, 25)), listener)
        feeders.append(threading.Thread(target=_feed, args=(engine, str(i), listener, room)))
        feeders[-1].start()
    for feeder in feeders:
        feeder.join()
    for listener in listeners:
        listener.wait()
    took_s = time.perf_counter() - began_s
    speech_s = frames * FRAME_S
    rtfs = [(listener.ended_s - listener.began_s) / speech_s for listener in listeners]
    firsts_ms = [1e3 * (listener.first_s - listener.began_s) for listener in listeners]
    waits_ms = engine.waited_ms or [0.0]
    assert all(listener.frames == frames for listener in listeners)
    return {
        "requests": requests,
        "concurrency": concurrency,
        "frames": frames,
        "mean_rtf": round(statistics.mean(rtfs), 4),
        "max_rtf": round(max(rtfs), 4),
        "frames_per_s": round(requests * frames / took_s, 1),
        "max_waited_steps": max(engine.waited_steps, default=0),
        "median_wait_ms": round(statistics.median(waits_ms), 2),
        "p99_wait_ms": round(float(np.percentile(waits_ms, 99)), 2),
        "median_first_chunk_ms": round(statistics.median(firsts_ms), 1),
        "p99_first_chunk_ms": round(float(np.percentile(firsts_ms, 99)), 1),
    }


def _feed(engine: LocalTalkerEngine, session_id: str, listener: Listener, room: threading.Semaphore) -> None:
    for i in range(1, TEXT_TOKENS):
        if listener.ended.wait(max(0.0, listener.began_s + i * TOKEN_S - time.perf_counter())):
            break
        engine.append(session_id, np.array([20 + i], np.int32), i == TEXT_TOKENS - 1)
    listener.ended.wait()
    room.release()
