#!/usr/bin/env python3
"""How fast the talker's engine is, without Triton and without a checkpoint's weights.

    scripts/bench_talker.py                                   # true shape, random weights, one GPU: about 2 minutes
    scripts/bench_talker.py --checkpoint checkpoints/demo ... # another talker; also on CPU

Prints a table and writes it to docs/performance/talker.json: sessions in lockstep by batch and context, what each step
of the way bought, a profile of one step, and sessions that arrive at random and hear their text at a thinker's pace.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import CodesEvent, Int32, TalkerStart
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.factory import load_runner, make_runner, wants_graphs
from triton_omni.talker.prefill import plan_prefill
from triton_omni.talker.random_weights import random_talker
from triton_omni.talker.runner import PendingFrames, Piece, TalkerRunner
from triton_omni.talker.session import Session
from triton_omni.talker.shape import TalkerShape

ROOT = Path(__file__).resolve().parent.parent
FRAME_S = 0.08
TEXT_TOKENS, TOKEN_S = 40, 0.012
SHAPE = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"

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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def lockstep(
    engine: LocalTalkerEngine, model: ModelConfig, clock: StepClock, batch: int, context: int, frames: int
) -> Row:
    """``batch`` sessions that all have their text, around ``context`` rows."""
    listeners = []
    for i in range(batch):
        listeners.append(Listener())
        start = start_of(model, context - frames // 2, frames, seed=i, chunks=(1, frames))
        engine.start(str(i), start, listeners[-1])
    for listener in listeners:
        listener.speaks.wait()
    clock.take()
    for i in range(batch):
        engine.append(str(i), np.empty(0, np.int32), True)
    for listener in listeners:
        listener.wait()
    steps = [step for step in clock.take() if step.rows == batch][1:]
    pairs = list(itertools.pairwise(steps))
    periods_ms = sorted(after.end_ms - before.end_ms for before, after in pairs)
    gaps_us = [1e3 * (after.begin_ms - before.end_ms) for before, after in pairs]
    median_ms = statistics.median(periods_ms)
    return {
        "batch": batch,
        "context": context,
        "ms_per_frame": round(median_ms, 3),
        "p99_ms": round(periods_ms[int(0.99 * (len(periods_ms) - 1))], 3),
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
    firsts_ms = sorted(1e3 * (listener.first_s - listener.began_s) for listener in listeners)
    waits_ms = sorted(engine.waited_ms) or [0.0]
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
        "p99_wait_ms": round(waits_ms[int(0.99 * (len(waits_ms) - 1))], 2),
        "median_first_chunk_ms": round(statistics.median(firsts_ms), 1),
        "p99_first_chunk_ms": round(firsts_ms[int(0.99 * (len(firsts_ms) - 1))], 1),
    }


def _feed(engine: LocalTalkerEngine, session_id: str, listener: Listener, room: threading.Semaphore) -> None:
    for i in range(1, TEXT_TOKENS):
        if listener.ended.wait(max(0.0, listener.began_s + i * TOKEN_S - time.perf_counter())):
            break
        engine.append(session_id, np.array([20 + i], np.int32), i == TEXT_TOKENS - 1)
    listener.ended.wait()
    room.release()


def profile(runner: Any, batches: Sequence[int]) -> Iterator[Row]:
    """Kernels of one step by the time they take together, from the profiler, without early starts of kernels."""
    from triton_omni.talker.fused import TILES

    activities = [torch.profiler.ProfilerActivity.CUDA]
    runner.fused.overlap = False
    for batch in batches:
        with torch.inference_mode():
            runner.fused.inputs(batch)[0] = torch.arange(batch, device=runner.slots.device)
            runner.fused.step(batch, TILES)
            with torch.profiler.profile(activities=activities) as found:
                runner.fused.step(batch, TILES)
                torch.cuda.synchronize()
        for kernel in sorted(found.key_averages(), key=lambda k: -k.device_time_total):
            if kernel.device_time_total > 0:
                us = round(kernel.device_time_total)
                yield {"batch": batch, "kernel": kernel.key[:60], "launches": kernel.count, "us": us}


def prefill_times(runner: Any, model: ModelConfig) -> Iterator[Row]:
    """Pieces of prompts behind rows that are there, each the mean of ten."""
    for context in (0, 2048):
        for bucket in runner.prefill_buckets:
            if context + bucket > runner.slots.max_context:
                continue
            plan = plan_prefill(start_of(model, context + bucket, 1, 0, (1,)), runner.shape)
            assert plan is not None
            prompt = runner.open(0, plan, TalkerSampling(), 0)
            piece = Piece(prompt, plan.rows - bucket, plan.rows)
            runner.prefill([piece])
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(10):
                runner.prefill([piece])
            torch.cuda.synchronize()
            yield {"rows": bucket, "behind": context, "ms": round(1e2 * (time.perf_counter() - began_s), 3)}


@torch.inference_mode()
def way(runner: Any, batches: Sequence[int], context: int) -> Iterator[Row]:
    """The same step in the forms that led here, each timed alone, without the engine."""
    from triton_omni.talker.fused import TILES

    plain, fused, state = TalkerRunner(runner.talker, runner.slots), runner.fused, runner.slots
    for batch in batches:
        slots = torch.arange(batch, device=state.device)
        texts = torch.zeros_like(slots)
        for i in range(batch):
            state.open(i, TalkerSampling(seed=i, min_frames=4096), seed=i, length=context, position=context)

        def plainly(slots: torch.Tensor = slots, texts: torch.Tensor = texts) -> None:
            plain.step(slots, texts, context + 64, False)

        def fusedly(batch: int = batch, slots: torch.Tensor = slots) -> None:
            fused.inputs(batch)[0] = slots
            fused.step(batch, TILES)

        def rewind() -> None:
            state.length.fill_(context)
            state.position.fill_(context)

        yield {"batch": batch, "step": "plain PyTorch", "ms": _eager_ms(plainly, rewind)}
        yield {"batch": batch, "step": "plain PyTorch in a CUDA graph", "ms": _graph_ms(plainly, rewind)}
        fused.overlap = False
        yield {"batch": batch, "step": "fused kernels", "ms": _eager_ms(fusedly, rewind)}
        yield {"batch": batch, "step": "fused kernels in a CUDA graph", "ms": _graph_ms(fusedly, rewind)}
        fused.overlap = torch.cuda.get_device_capability() >= (9, 0)
        yield {"batch": batch, "step": "and kernels that start early", "ms": _graph_ms(fusedly, rewind)}


def _eager_ms(step: Callable[[], None], rewind: Callable[[], None], repeats: int = 5) -> float:
    step()
    times = []
    for _ in range(repeats):
        rewind()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 3)


def _graph_ms(step: Callable[[], None], rewind: Callable[[], None]) -> float:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return _eager_ms(graph.replay, rewind, repeats=30)


def build(options: argparse.Namespace) -> tuple[Any, ModelConfig, TalkerConfig]:
    """A runner of a checkpoint, or of the true shape with random weights."""
    sessions = max(*options.batches, options.concurrency)
    config = TalkerConfig(
        max_sessions=sessions,
        max_context=max(options.contexts) + options.frames,
        buckets=tuple(sorted({*options.batches, sessions})),
        prefill_chunk=max(options.prefill_chunks),
        device=options.device,
    )
    if options.checkpoint is not None:
        model = ModelConfig.load(options.checkpoint)
        return load_runner(model, config), model, config
    model = ModelConfig(SHAPE, json.loads(SHAPE.read_text(encoding="utf-8")), {})
    shape, device = TalkerShape.read(model), config.torch_device()
    dtype = config.torch_dtype(device)
    with torch.inference_mode():
        talker = random_talker(shape, device, dtype)
        graphed = wants_graphs(shape, config, device)
        return make_runner(talker, config, device, dtype, graphed=graphed), model, config


def main() -> None:
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms  %(message)s")
    runner, model, config = build(options)
    on_gpu = runner.slots.device.type == "cuda"
    said = {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "commit": options.commit,
        "command": shlex.join(["scripts/bench_talker.py", *sys.argv[1:]]),
    }
    print(f"{said['gpu']}, torch {torch.__version__}, {used_gib()} GiB in use", flush=True)

    rows = []
    clock = StepClock(runner)
    engine = LocalTalkerEngine(runner, config)
    print("batch context  ms/frame     p99    step  idle us  frames/s", flush=True)
    for batch in options.batches:
        for context in options.contexts:
            row = lockstep(engine, model, clock, batch, context, options.frames)
            rows.append(row | said)
            shown = (row[k] for k in ("batch", "context", "ms_per_frame", "p99_ms", "step_ms", "idle_gap_us"))
            print("{:5} {:7} {:9.3f} {:7.3f} {:7.3f} {:8.1f}".format(*shown), f"{row['frames_per_s']:9.1f}", flush=True)
    engine.close()

    arrived = []
    for chunk in options.prefill_chunks:
        watched = WatchedEngine(runner, dataclasses.replace(config, prefill_chunk=chunk))
        row = arrivals(watched, model, options.requests, options.concurrency, options.frames, options.prompt_rows)
        watched.close()
        arrived.append({"prefill_chunk": chunk, **row} | said)
        print("arrivals", json.dumps(arrived[-1]), flush=True)

    prefills, steps, kernels = [], [], []
    if on_gpu and hasattr(runner, "fused"):
        for row in prefill_times(runner, model):
            prefills.append(row)
            print("prefill", json.dumps(row), flush=True)
        for row in way(runner, [1, max(options.batches)], 512):
            steps.append(row)
            print("way", json.dumps(row), flush=True)
        for row in profile(runner, [1, max(options.batches)]):
            kernels.append(row)
            print("profile", json.dumps(row), flush=True)
    result = {"rows": rows, "arrivals": arrived, "prefill": prefills, "steps_of_the_way": steps, "profile": kernels}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="use its weights instead of random ones of the true shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 4096])
    parser.add_argument("--frames", type=int, default=150, help="of each session")
    parser.add_argument("--requests", type=int, default=200, help="that arrive at random")
    parser.add_argument("--concurrency", type=int, default=64, help="of these")
    parser.add_argument("--prompt-rows", type=int, default=300, help="at most, of these")
    parser.add_argument("--prefill-chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--commit", default=_commit())
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance" / "talker.json")
    return parser.parse_args()


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
