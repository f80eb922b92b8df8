"""What code2wav can be told."""

from __future__ import annotations

import dataclasses

import torch

from triton_omni.errors import ConfigError, InvalidRequestError

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclasses.dataclass(frozen=True, slots=True)
class Code2WavConfig:
    """``max_sessions``: sessions that live at once, one slot of state each; ``device``: "auto" (a GPU where there is
    one), "cpu", "cuda", "cuda:1" …; ``dtype`` of weights and state: "float32" or "float64"; ``max_step_frames``: most
    frames (rows x frames per row) of one forward, which bounds memory, None for the device's own; ``idle_timeout_s``:
    a session that has received nothing for so long is dropped, so that lost streams cannot keep slots; longer than a
    request may take.

    Raises: InvalidRequestError naming the field.
    """

    max_sessions: int = 64
    device: str = "auto"
    dtype: str = "float32"
    max_step_frames: int | None = None
    idle_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for field in ("max_sessions", "max_step_frames"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidRequestError(field, f"must be at least 1, got {value}")
        if self.dtype not in _DTYPES:
            raise InvalidRequestError("dtype", f"must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if not self.idle_timeout_s > 0:
            raise InvalidRequestError("idle_timeout_s", f"must be above 0, got {self.idle_timeout_s:g}")

    def torch_device(self) -> torch.device:
        """Where code2wav runs. Raises ConfigError when it asks for a GPU that is not there."""
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

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def step_frames(self, device: torch.device) -> int:
        """``max_step_frames``, or what suits the device: on CPU 64 frames, because larger steps leave the caches and
        take up to twice as long per frame (demo size); on a GPU 64 sessions with 25 frames each.
        """
        if self.max_step_frames is not None:
            return self.max_step_frames
        return 64 if device.type == "cpu" else 1600
