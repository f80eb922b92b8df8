"""The Runner whose steps are CUDA graphs: one per number of rows, replayed with nothing but small integers as input."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triton_omni.pipeline.stages import Int32
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.config import MAX_GRAPHED_ROWS
from triton_omni.talker.fused import PRECISE_TILES, PREFILL_TILES, PROMPT_INPUTS, TILES, FusedStep
from triton_omni.talker.model import Talker
from triton_omni.talker.prefill import NONE, Prefill, media_rows
from triton_omni.talker.runner import PendingFrames, Piece, Prompt
from triton_omni.talker.shape import TalkerShape
from triton_omni.talker.slots import Slots

logger = logging.getLogger(__name__)

PREFILL_BUCKETS = (16, 32, 64, 128, MAX_GRAPHED_ROWS)
# So many launches may be on their way before the host waits for the oldest one's copy.
_STAGES = 4


class Staging:
    """Pinned host memory in front of or behind the device: each of a few pieces is used in turn."""

    def __init__(self, integers: int) -> None:
        self._host = torch.zeros(_STAGES, integers, dtype=torch.long).pin_memory()
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def _next(self) -> tuple[Tensor, torch.cuda.Event]:
        turn, self._turn = self._turn, (self._turn + 1) % _STAGES
        self._copied[turn].synchronize()
        return self._host[turn], self._copied[turn]

    def send(self, values: npt.NDArray[np.int64], to: Tensor) -> None:
        """Enqueue a copy of ``values`` into ``to``, of the same shape and contiguous."""
        host, copied = self._next()
        piece = host[: values.size].view(values.shape)
        piece.numpy()[:] = values
        to.copy_(piece, non_blocking=True)
        copied.record()

    def fetch(self, codes: Tensor) -> FetchedFrames:
        """Enqueue a copy of ``codes`` [B, groups], contiguous."""
        host, copied = self._next()
        piece = host[: codes.numel()].view(codes.shape)
        piece.copy_(codes, non_blocking=True)
        copied.record()
        return FetchedFrames(piece, copied)


class FetchedFrames:
    """PendingFrames in pinned memory; to be read before a few further steps reuse it."""

    def __init__(self, codes: Tensor, arrived: torch.cuda.Event) -> None:
        self._codes, self._arrived = codes, arrived

    def read(self) -> Int32:
        self._arrived.synchronize()
        return self._codes.numpy().astype(np.int32)


class GraphedRunner:
    """FusedStep in CUDA graphs, on a stream of its own. ``buckets``: numbers of rows of a step, ascending;
    ``prefill_rows``: most rows of one prefill. Captures everything at once, with a line of log for each graph.
    """

    runs_ahead = True

    def __init__(self, talker: Talker, slots: Slots, buckets: Sequence[int], prefill_rows: int) -> None:
        self.talker, self.slots, self.buckets = talker, slots, tuple(buckets)
        self.prefill_buckets = (*(bucket for bucket in PREFILL_BUCKETS if bucket < prefill_rows), prefill_rows)
        precise = slots.kv.dtype == torch.float32
        self._tiles = PRECISE_TILES if precise else TILES
        self._prefill_tiles = PRECISE_TILES if precise else PREFILL_TILES
        most = max(self.buckets[-1], prefill_rows)
        overlap = torch.cuda.get_device_capability(slots.device) >= (9, 0)
        self.fused = FusedStep(talker, slots, most, overlap=overlap)
        torch.cuda.empty_cache()  # what packing the weights has left behind is other stages' to use
        self._inputs = Staging(self.fused.prompt_inputs(most).numel())
        self._outputs = Staging(self.fused.frames.numel())
        self._pool = torch.cuda.graph_pool_handle()
        # A step must not wait behind the work of other stages in this process.
        self._stream = torch.cuda.Stream(slots.device, priority=-1)  # type: ignore[no-untyped-call]
        with torch.cuda.device(slots.device):
            self._prefills = self._capture("prefill", self.prefill_buckets, self._warm_prefill)
            self._steps = self._capture("step", self.buckets, self._warm_step)
            torch.cuda.synchronize()

    @property
    def shape(self) -> TalkerShape:
        return self.talker.shape

    @torch.inference_mode()
    def _capture(
        self, name: str, buckets: Sequence[int], warm: Callable[[int], Callable[[], None]]
    ) -> dict[int, torch.cuda.CUDAGraph]:
        """A graph for each number of rows. The largest comes first, so that the others share its memory."""
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for done, bucket in enumerate(reversed(buckets), start=1):
            began_s = time.monotonic()
            launch = warm(bucket)
            launch()  # compiles the kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                launch()
            graphs[bucket] = graph
            took_s = time.monotonic() - began_s
            logger.info("talker %s of %d rows captured in %.1f s (%d of %d)", name, bucket, took_s, done, len(buckets))
        return graphs

    def _warm_step(self, bucket: int) -> Callable[[], None]:
        slots, text_ids = self.fused.inputs(bucket)
        slots.fill_(self.slots.spare)
        text_ids.zero_()
        return lambda: self.fused.step(bucket, self._tiles)

    def _warm_prefill(self, bucket: int) -> Callable[[], None]:
        given = self.fused.prompt_inputs(bucket)
        given.zero_()
        given[0] = self.slots.spare
        return lambda: self.fused.prefill(bucket, self._prefill_tiles)

    @torch.inference_mode()
    def open(self, slot: int, prefill: Prefill, sampling: TalkerSampling, seed: int) -> Prompt:
        with torch.cuda.stream(self._stream):
            # Prefill counts its rows itself, so the slot can stand behind them from the start.
            self.slots.open(slot, sampling, seed, length=prefill.rows, position=prefill.next_position)
            rows = media_rows(prefill, self.talker) if len(prefill.media_at) else self.fused.media[:0]
        return Prompt(slot, prefill, rows)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> None:
        count = sum(piece.last - piece.first for piece in pieces)
        bucket = _fitting(self.prefill_buckets, count)
        given = np.zeros((PROMPT_INPUTS, bucket), np.int64)
        given[0], given[2] = self.slots.spare, NONE
        at = 0
        for piece in pieces:
            end, prefill, rows = at + piece.last - piece.first, piece.prompt.prefill, slice(piece.first, piece.last)
            given[0, at:end] = piece.prompt.slot
            given[1, at:end] = prefill.text_ids[rows]
            given[2, at:end] = prefill.codec_ids[rows]
            given[3, at:end] = np.arange(piece.first, piece.last)
            given[4:, at:end] = prefill.positions[:, rows]
            at = end
        with torch.cuda.stream(self._stream):
            self._place_media(pieces)
            self._inputs.send(given, self.fused.prompt_inputs(bucket))
            self._prefills[bucket].replay()

    def _place_media(self, pieces: Sequence[Piece]) -> None:
        """The media rows of all pieces into those of the coming prefill."""
        at = 0
        for piece in pieces:
            where = piece.prompt.prefill.media_at
            first, last = np.searchsorted(where, (piece.first, piece.last))
            if first < last:
                index = torch.from_numpy(where[first:last] - piece.first + at).pin_memory()
                index = index.to(self.slots.device, non_blocking=True)
                self.fused.media.index_copy_(0, index, piece.prompt.rows[first:last])
            at += piece.last - piece.first

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], text_ids: Sequence[int], limit: int) -> PendingFrames:
        count = len(slots)
        bucket = _fitting(self.buckets, count)
        given = np.zeros((2, bucket), np.int64)
        given[0] = self.slots.spare
        given[0, :count], given[1, :count] = slots, text_ids
        with torch.cuda.stream(self._stream):
            self._inputs.send(given, self.fused.inputs(bucket))
            self.replay(bucket)
            return self._outputs.fetch(self.fused.frames[:count])

    def replay(self, bucket: int) -> None:
        """Enqueue the step of that many rows on what its inputs hold."""
        self._steps[bucket].replay()


def _fitting(buckets: Iterable[int], count: int) -> int:
    return next(bucket for bucket in buckets if bucket >= count)
