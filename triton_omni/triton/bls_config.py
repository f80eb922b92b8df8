"""What omni_bls can be told beside PipelineConfig. In a file of its own: a launcher checks it outside Triton."""

from __future__ import annotations

import dataclasses

from triton_omni.pipeline.chunk_policy import DEFAULT_CHUNK_FRAMES


@dataclasses.dataclass(frozen=True, slots=True)
class BlsConfig:
    """How requests are handed on that do not say it themselves, and the names of the three models it calls."""

    chunk_frames: tuple[int, ...] = DEFAULT_CHUNK_FRAMES
    chunk_policy: str = "fixed"
    async_chunk: bool = True
    thinker_model: str = "thinker"
    talker_model: str = "talker"
    code2wav_model: str = "code2wav"
