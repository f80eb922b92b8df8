"""What code2wav's fused decoder takes of a GPU, known before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from triton_omni.code2wav.buckets import Bucket
from triton_omni.code2wav.fused import FusedDecoder
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.packing import PackedCode2Wav
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.errors import ConfigError

# Kernels' binaries and CUDA graphs.
_GRAPHS_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. ``weights``; ``slot``: one session's state (there is one slot more than ``sessions``, for rows that fill a
    bucket up); ``work``: the largest step's buffers, and the graphs.
    """

    weights: int
    slot: int
    sessions: int
    work: int

    @classmethod
    def of(cls, shape: Code2WavShape, dtype: torch.dtype, sessions: int, buckets: Sequence[Bucket]) -> MemoryPlan:
        """Built as it will be on the GPU, but without memory."""
        meta = torch.device("meta")
        with meta:
            model = StreamingCode2Wav(shape)
        packed = PackedCode2Wav(model, dtype, meta)
        decoder = FusedDecoder(packed, sessions + 1, buckets)
        return cls(packed.nbytes, decoder.state_bytes // (sessions + 1), sessions, decoder.work_bytes + _GRAPHS_BYTES)

    @property
    def total(self) -> int:
        return self.weights + (self.sessions + 1) * self.slot + self.work

    def check(self, free: int, device: torch.device) -> None:
        """Raises ConfigError with the arithmetic when ``free`` bytes are not enough."""
        if self.total > free:
            raise ConfigError(
                f"{self}, but {device} has {_gib(free)} free: lower max_step_frames or max_sessions",
                field="max_step_frames",
            )

    def __str__(self) -> str:
        return (
            f"needs {_gib(self.weights)} of weights + {self.sessions + 1} slots x {self.slot / 2**20:.2f} MiB + "
            f"{_gib(self.work)} to work in = {_gib(self.total)}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
