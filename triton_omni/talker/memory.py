"""What the talker takes of a GPU, known before anything is loaded."""

from __future__ import annotations

import dataclasses

import torch

from triton_omni.errors import ConfigError
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.model import Talker
from triton_omni.talker.shape import TalkerShape

# Kernels' binaries, CUDA graphs, static buffers, and what packing the weights takes for a while: 2.2 GiB were seen.
_GRAPHED_BYTES = 5 * 2**29
# Plain PyTorch: every expert's output for a batch of rows, and copies of the past keys.
_EAGER_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. ``weights``: parameters, projected text table and rotary tables; ``slot``: keys and values of one session
    (there is one slot more than ``sessions``, for rows that fill a batch up); ``work``: everything else.
    """

    weights: int
    slot: int
    sessions: int
    work: int

    @classmethod
    def of(cls, shape: TalkerShape, config: TalkerConfig, dtype: torch.dtype, *, graphed: bool) -> MemoryPlan:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in Talker(shape).parameters())
        decoder = shape.backbone
        tables = shape.thinker_vocab * decoder.hidden
        rotary = shape.max_positions * decoder.head_dim * torch.float32.itemsize if graphed else 0
        row = decoder.layers * 2 * decoder.kv_heads * decoder.head_dim
        return cls(
            weights=(parameters + tables) * dtype.itemsize + rotary,
            slot=row * config.max_context * dtype.itemsize + decoder.vocab,
            sessions=config.max_sessions,
            work=_GRAPHED_BYTES if graphed else _EAGER_BYTES,
        )

    @property
    def total(self) -> int:
        return self.weights + (self.sessions + 1) * self.slot + self.work

    def check(self, free: int, device: torch.device) -> None:
        """Raises ConfigError with the arithmetic when ``free`` bytes are not enough."""
        if self.total <= free:
            return
        fitting = (free - self.weights - self.work) // self.slot - 1
        remedy = f"max_sessions {fitting} would fit" if fitting >= 1 else "not even one session fits"
        raise ConfigError(
            f"needs {_size(self.weights)} of weights + {self.sessions + 1} slots x {_size(self.slot)} + "
            f"{_size(self.work)} to work in = {_size(self.total)}, but {device} has {_size(free)} free: {remedy}",
            field="talker.max_sessions",
        )


def _size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
