"""What the frontend is told at start."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """``triton_url`` is tritonserver's gRPC address (host:port). ``model_name`` is what clients write in ``model``;
    empty: the name of the checkpoint's directory. ``stall_timeout_s`` bounds the wait for the next piece of an answer;
    it is longer than omni_bls's own time-out, and only notices a server that has died.
    """

    checkpoint: Path
    triton_url: str = "127.0.0.1:8001"
    host: str = "127.0.0.1"
    port: int = 9000
    model_name: str = ""
    max_body_bytes: int = 64 * 2**20
    max_media_bytes: int = 32 * 2**20
    stall_timeout_s: float = 660.0
    drain_s: float = 10.0
    log_level: str = "info"

    @property
    def served_model(self) -> str:
        return self.model_name or self.checkpoint.resolve().name
