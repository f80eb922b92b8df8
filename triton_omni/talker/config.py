"""The talker stage's own settings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from triton_omni.errors import ConfigError
from triton_omni.model_config import WEIGHTS

if TYPE_CHECKING:
    import torch  # at run time only where it is needed: a launcher checks these settings, and must not wait for it

# Prompt rows of one graph: more would keep running sessions waiting for longer than one of their steps.
MAX_GRAPHED_ROWS = 256
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class TalkerConfig:
    """``max_sessions``: sessions that speak at once (one KV slot each), more wait; ``max_context``: rows of one slot,
    prompt rows and codec frames together; ``device``: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1" …;
    ``dtype`` of weights and KV cache: "auto" (bfloat16 on a GPU, float32 on CPU), "float32", "bfloat16" or "float16".

    ``prefill_chunk``: prompt rows, of one session or several, computed at once; ``prefill_chunks_per_step``: so many of
    these chunks at most between two decode steps, and no more than one while a session's next codes may come late.

    ``cuda_graph``: a step is one replay of a CUDA graph of fused kernels; None: where device and checkpoint allow it.
    ``buckets``: numbers of rows that get a graph (a batch is filled up to the next one); empty: 1, 2, 4, 8, 16, 24, 32,
    48, 64 as far as max_sessions needs them. ``async_output``: launch a step before the last one's codes are read;
    None: where the device runs ahead of the host. ``weights``: "checkpoint", or "random" ones of the checkpoint's
    shapes, for which config.json is enough.

    Raises: ConfigError naming the field.
    """

    max_sessions: int = 32
    max_context: int = 4096
    prefill_chunk: int = 128
    prefill_chunks_per_step: int = 4
    device: str = "auto"
    dtype: str = "auto"
    cuda_graph: bool | None = None
    buckets: tuple[int, ...] = ()
    async_output: bool | None = None
    weights: str = "checkpoint"

    def __post_init__(self) -> None:
        for field in ("max_sessions", "max_context", "prefill_chunk", "prefill_chunks_per_step"):
            if getattr(self, field) < 1:
                raise ConfigError(f"must be at least 1, got {getattr(self, field)}", field=f"talker.{field}")
        if self.dtype not in ("auto", *_DTYPES):
            raise ConfigError(f"must be one of auto, {', '.join(_DTYPES)}, got {self.dtype!r}", field="talker.dtype")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"must be one of {', '.join(WEIGHTS)}, got {self.weights!r}", field="talker.weights")
        if self.buckets and (min(self.buckets) < 1 or max(self.buckets) < self.max_sessions):
            raise ConfigError(
                f"must be at least 1, the largest at least max_sessions {self.max_sessions}, got {self.buckets}",
                field="talker.buckets",
            )

    def row_buckets(self) -> tuple[int, ...]:
        """The sizes of decode batches that get a graph, ascending."""
        if self.buckets:
            return tuple(sorted(set(self.buckets)))
        return (*(bucket for bucket in BUCKETS if bucket < self.max_sessions), self.max_sessions)

    def torch_device(self) -> torch.device:
        """Where the talker runs. Raises ConfigError when it asks for a GPU that is not there."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(
                f"must be auto, cpu, cuda or cuda:N, got {self.device!r}", field="talker.device"
            ) from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"{self.device!r} is not there: {torch.cuda.device_count()} GPUs are visible", field="talker.device"
            )
        return device

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of weights and KV cache on ``device``."""
        import torch

        if self.dtype == "auto":
            return torch.float32 if device.type == "cpu" else torch.bfloat16
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype
