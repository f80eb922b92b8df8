"""What code2wav can be told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from triton_omni.errors import ConfigError, InvalidRequestError
from triton_omni.model_config import WEIGHTS

if TYPE_CHECKING:
    import torch  # at run time only where it is needed: a launcher checks these settings, and must not wait for it

_EXACT = ("float32", "float64")
_HALF = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class Code2WavConfig:
    """``max_sessions``: sessions that live at once, one slot of state each; one more is refused, and a session lives on
    when the talker has ended its own, so there must be as many as requests that run; ``device``: "auto" (a GPU where
    there is one), "cpu", "cuda", "cuda:1" …; ``dtype``: "auto" (float16 on a GPU, float32 on CPU), "float16" or
    "bfloat16" (operands of fused kernels, on a GPU only; sums are float32; bfloat16 costs 18 dB), "float32" or
    "float64" (plain PyTorch); ``cuda_graph``: a step is one replay of a CUDA graph of the fused kernels, None: wherever
    those run; ``max_step_frames``: most frames (rows x frames per row) of one forward, which bounds memory, None for
    the device's own; ``idle_timeout_s``: a session that has received nothing for so long is dropped, so that lost
    streams cannot keep slots; longer than a request may take; ``weights``: "checkpoint", or "random" ones of the
    checkpoint's shapes, for which config.json is enough.

    Raises: InvalidRequestError naming the field.
    """

    max_sessions: int = 256
    device: str = "auto"
    dtype: str = "auto"
    cuda_graph: bool | None = None
    max_step_frames: int | None = None
    idle_timeout_s: float = 900.0
    weights: str = "checkpoint"

    def __post_init__(self) -> None:
        for field in ("max_sessions", "max_step_frames"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidRequestError(field, f"must be at least 1, got {value}")
        known = ("auto", *_HALF, *_EXACT)
        if self.dtype not in known:
            raise InvalidRequestError("dtype", f"must be one of {', '.join(known)}, got {self.dtype!r}")
        if self.weights not in WEIGHTS:
            raise InvalidRequestError("weights", f"must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        if self.cuda_graph and self.dtype in _EXACT:
            raise InvalidRequestError("cuda_graph", f"needs dtype auto, float16 or bfloat16, got {self.dtype}")
        if not self.idle_timeout_s > 0:
            raise InvalidRequestError("idle_timeout_s", f"must be above 0, got {self.idle_timeout_s:g}")

    def torch_device(self) -> torch.device:
        """Where code2wav runs. Raises ConfigError when it asks for a GPU that is not there."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"must be auto, cpu, cuda or cuda:N, got {self.device!r}", field="device") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"{self.device!r} is not there: {torch.cuda.device_count()} GPUs are visible", field="device"
            )
        return device

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype on ``device``; half precision means the fused kernels.

        Raises: ConfigError where the settings ask for what runs on GPUs only.
        """
        import torch

        if device.type != "cuda":
            if self.dtype in _HALF:
                raise ConfigError(f"{self.dtype} needs a GPU, on {device} use float32 or float64", field="dtype")
            if self.cuda_graph:
                raise ConfigError(f"CUDA graphs need a GPU, on {device} use false", field="cuda_graph")
        if self.dtype == "auto":
            return torch.float16 if device.type == "cuda" else torch.float32
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def step_frames(self, device: torch.device) -> int:
        """``max_step_frames``, or what suits the device: on CPU 64 frames, because larger steps leave the caches and
        take up to twice as long per frame (demo size); on a GPU 64 sessions with 25 frames each.
        """
        if self.max_step_frames is not None:
            return self.max_step_frames
        return 64 if device.type == "cpu" else 1600
