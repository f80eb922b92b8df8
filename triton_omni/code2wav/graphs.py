"""code2wav's steps as CUDA graphs, one per bucket, and the rows of a call spread over them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from triton_omni.code2wav.buckets import Bucket, BucketStep, Planner
from triton_omni.code2wav.fused import FusedDecoder, Inputs
from triton_omni.code2wav.runner import Row, Wave, final_part, to_int16

logger = logging.getLogger(__name__)

# What a bucket is taken to cost where none was measured: a step's launches, and then its frames.
_STEP_MS, _FRAME_MS = 1.0, 0.02


class FusedRunner:
    """Runs rows of codes through a FusedDecoder. Output as ``Runner``'s.

    ``cuda_graph``: capture every bucket now and measure it; otherwise each step launches its kernels one by one.
    """

    def __init__(self, decoder: FusedDecoder, *, cuda_graph: bool) -> None:
        self.shape = decoder.shape
        self.decoder = decoder
        self.max_step_frames = max(bucket.size for bucket in decoder.buckets)
        self._device = decoder.inputs.device
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        costs_ms = {bucket: _STEP_MS + _FRAME_MS * bucket.size for bucket in decoder.buckets}
        if cuda_graph:
            costs_ms = self._warm_up()
        self._planner = Planner(costs_ms)

    @torch.inference_mode()
    def decode(self, rows: Sequence[Row], finish: Callable[[Tensor], Tensor] = to_int16) -> list[Wave]:
        """As ``Runner.decode``. The host waits once, for the last step's samples."""
        if self._device.type == "cpu":
            return self._decode(rows, finish)
        with torch.cuda.device(self._device):
            return self._decode(rows, finish)

    def _decode(self, rows: Sequence[Row], finish: Callable[[Tensor], Tensor]) -> list[Wave]:
        pending: list[tuple[BucketStep, Tensor]] = []
        for step in self._planner.plan([len(row.codes) for row in rows]):
            self._stage(rows, step)
            self.launch(step.bucket)
            wave = self.decoder.wave[: step.bucket.size * self.shape.samples_per_frame].view(step.bucket.rows, -1)
            pending.append((step, self._to_host(finish(wave[: len(step.rows)]))))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        pieces: list[list[Wave]] = [[] for _ in rows]
        for step, samples in pending:
            for row, wave in zip(step.rows, samples.numpy(), strict=True):
                frames = min(step.bucket.frames, len(rows[row].codes) - step.start)
                pieces[row].append(final_part(self.shape, wave, rows[row].position + step.start, frames))
        return [self._joined(parts, finish) for parts in pieces]

    def _joined(self, parts: list[Wave], finish: Callable[[Tensor], Tensor]) -> Wave:
        if len(parts) == 1:
            return parts[0]  # a view of the pinned copy: megabytes in a full batch, not to be copied again
        return np.concatenate(parts) if parts else finish(self.decoder.wave[:0]).cpu().numpy()

    def launch(self, bucket: Bucket) -> None:
        """One step on what stands in ``decoder.inputs``."""
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self.decoder.step(bucket)

    def _stage(self, rows: Sequence[Row], step: BucketStep) -> None:
        """The step's inputs to the device; rows beyond ``step.rows`` work on the spare slot."""
        storage, groups = self.decoder.inputs, self.shape.code_groups
        given = Inputs.of(storage, step.bucket, groups)
        staged = torch.zeros(len(given.everything), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host = Inputs.of(staged, step.bucket, groups)
        slots, positions, lengths, codes = (t.numpy() for t in (host.slots, host.positions, host.lengths, host.codes))
        slots[:] = self.decoder.spare
        for b, row in enumerate(rows[r] for r in step.rows):
            now = row.codes[step.start : step.start + step.bucket.frames]
            slots[b], positions[b], lengths[b] = row.slot, row.position + step.start, len(now)
            codes[b, : len(now)] = now
        given.everything.copy_(staged, non_blocking=True)

    def _to_host(self, samples: Tensor) -> Tensor:
        if samples.device.type == "cpu":
            return samples.clone()
        host = torch.empty(samples.shape, dtype=samples.dtype, pin_memory=True)
        return host.copy_(samples, non_blocking=True)

    @torch.inference_mode()
    def _warm_up(self) -> dict[Bucket, float]:
        """Compile, capture and measure every bucket, on the spare slot. Returns milliseconds of each."""
        costs_ms: dict[Bucket, float] = {}
        began_s = time.monotonic()
        self.decoder.inputs.zero_()
        pool = torch.cuda.graph_pool_handle()
        by_size = sorted(self.decoder.buckets, key=lambda bucket: bucket.size, reverse=True)
        for number, bucket in enumerate(by_size, 1):
            Inputs.of(self.decoder.inputs, bucket, self.shape.code_groups).slots.fill_(self.decoder.spare)
            self.decoder.step(bucket)  # compiles
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.decoder.step(bucket)
            self._graphs[bucket] = graph
            costs_ms[bucket] = _replay_ms(graph)
            if number % 10 == 0 or number == len(by_size):
                passed_s = time.monotonic() - began_s
                logger.info("code2wav: %d of %d graphs captured, %.1f s", number, len(by_size), passed_s)
        return costs_ms


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """The faster of two replays."""
    times_ms: list[float] = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return min(times_ms)
