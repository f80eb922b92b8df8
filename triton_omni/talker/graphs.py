"""The talker's steps as CUDA graphs: one per batch bucket, replayed with nothing but slot numbers and text ids."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triton_omni.pipeline.stages import Int32
from triton_omni.talker.fused import TILES, FusedStep

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
# A step's inputs and outputs are staged in host memory that the copies of two later steps must not touch.
_STAGES = 4


class PendingFrames:
    """Codes on their way to the host."""

    def __init__(self, codes: Tensor, arrived: torch.cuda.Event) -> None:
        self._codes, self._arrived = codes, arrived

    def read(self) -> Int32:
        """Codes int32 [B, groups]; waits for the copy."""
        self._arrived.synchronize()
        return self._codes.numpy().astype(np.int32)


class GraphedSteps:
    """Replays ``fused.step`` for any number of rows up to the largest bucket."""

    def __init__(self, fused: FusedStep, buckets: Sequence[int] = BUCKETS) -> None:
        self.fused = fused
        self.buckets = sorted(buckets)
        top = self.buckets[-1]
        self._inputs = torch.zeros(_STAGES, 2, top, dtype=torch.long).pin_memory()
        self._outputs = torch.zeros(_STAGES, top, fused.frames.shape[1], dtype=torch.long).pin_memory()
        self._arrived = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._graphs = self._capture()

    @torch.inference_mode()
    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        """Every bucket on the spare slot. The largest comes first, so that the others share its memory."""
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        self.fused.slots.fill_(self.fused.state.spare)
        self.fused.text_ids.zero_()
        for bucket in reversed(self.buckets):
            began_s = time.monotonic()
            self.fused.step(bucket, TILES)  # compiles the kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.fused.step(bucket, TILES)
            graphs[bucket] = graph
            logger.info("talker step for %d rows captured in %.1f s", bucket, time.monotonic() - began_s)
        return graphs

    @torch.inference_mode()
    def launch(self, slots: Sequence[int], text_ids: Sequence[int]) -> PendingFrames:
        """Enqueue one step and the copy of its codes; returns at once."""
        count = len(slots)
        bucket = next(b for b in self.buckets if b >= count)
        stage, self._turn = self._turn, (self._turn + 1) % _STAGES
        given = self._inputs[stage]
        given[0, :count] = torch.as_tensor(slots)
        given[1, :count] = torch.as_tensor(text_ids)
        given[0, count:bucket] = self.fused.state.spare
        given[1, count:bucket] = 0
        self.fused.slots[:bucket].copy_(given[0, :bucket], non_blocking=True)
        self.fused.text_ids[:bucket].copy_(given[1, :bucket], non_blocking=True)
        self._graphs[bucket].replay()
        codes = self._outputs[stage, :count]
        codes.copy_(self.fused.frames[:count], non_blocking=True)
        self._arrived[stage].record()
        return PendingFrames(codes, self._arrived[stage])
