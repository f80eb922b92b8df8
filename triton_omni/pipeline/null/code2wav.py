"""A vocoder without a model."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from triton_omni.errors import InvalidRequestError, NotFoundError, OmniError, StageError
from triton_omni.model_config import SAMPLE_RATE_HZ
from triton_omni.pipeline.null.checks import at_least
from triton_omni.pipeline.stages import CodesChunk, Int16

FRAME_SAMPLES = 1920
LOOK_AHEAD_SAMPLES = 555
AMPLITUDE = 3276


@dataclasses.dataclass(frozen=True, slots=True)
class NullCode2WavConfig:
    """A sawtooth of ``tone_hz`` at a tenth of full scale; 0 gives silence."""

    tone_hz: float = 220.0
    code_groups: int = 16

    def __post_init__(self) -> None:
        at_least(self, tone_hz=0, code_groups=1)


class NullCode2Wav:
    """Code2WavEngine: 1,920 samples per frame less the real decoder's look-ahead of 555, whatever the codes are."""

    def __init__(self, config: NullCode2WavConfig | None = None) -> None:
        self._config = config or NullCode2WavConfig()
        self._lock = threading.Lock()
        self._frames: dict[str, int] = {}
        self._wave = np.empty(0, np.int16)
        self._closed = False

    def decode(self, chunks: Sequence[CodesChunk]) -> list[Int16 | OmniError]:
        """One result per chunk: int16 [samples] or the chunk's own error."""
        with self._lock:
            return [self._decode(chunk) for chunk in chunks]

    def stats(self) -> dict[str, int]:
        """``running``: sessions that are open."""
        with self._lock:
            return {"running": len(self._frames)}

    def close(self) -> None:
        """Forget all sessions; later chunks are refused."""
        with self._lock:
            self._closed = True
            self._frames.clear()

    def _decode(self, chunk: CodesChunk) -> Int16 | OmniError:
        if self._closed:
            return StageError("code2wav", "the engine is closed")
        if chunk.codes.ndim != 2 or chunk.codes.shape[1] != self._config.code_groups:
            return InvalidRequestError(
                "codes", f"must be [frames, {self._config.code_groups}], got {list(chunk.codes.shape)}"
            )
        live = chunk.session_id in self._frames
        if chunk.start and live:
            return InvalidRequestError("start", f"session {chunk.session_id!r} has started already")
        if not chunk.start and not live:
            return NotFoundError("session_id", f"no session {chunk.session_id!r}: begin it with start")
        before = self._frames.get(chunk.session_id, 0)
        after = self._frames[chunk.session_id] = before + chunk.codes.shape[0]
        if chunk.end:
            del self._frames[chunk.session_id]
        first, end = (max(0, n * FRAME_SAMPLES - LOOK_AHEAD_SAMPLES) for n in (before, after))
        if end > self._wave.size:
            self._wave = self._tone(2 * end)
        return self._wave[first:end]

    def _tone(self, samples: int) -> Int16:
        phase = np.arange(samples) * (self._config.tone_hz / SAMPLE_RATE_HZ) % 1.0
        return ((phase - 0.5) * 2 * AMPLITUDE * bool(self._config.tone_hz)).astype(np.int16)
