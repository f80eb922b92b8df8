"""Steps of the runner without the engine: their kernels, the forms that led to them, pieces of prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from triton_omni.model_config import ModelConfig
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.fused import TILES
from triton_omni.talker.measure.sessions import Row, cuda_event, start_of
from triton_omni.talker.prefill import plan_prefill
from triton_omni.talker.runner import Piece, TalkerRunner


def profile(runner: Any, batches: Sequence[int]) -> Iterator[Row]:
    """Kernels of one step by the time they take together, from the profiler, without early starts of kernels."""
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
    times: list[float] = []
    for _ in range(repeats):
        rewind()
        begin, end = cuda_event(), cuda_event()
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
