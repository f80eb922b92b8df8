"""Settings of the thinker stage."""

from __future__ import annotations

import dataclasses

from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import WEIGHTS

ENGINES = ("auto", "vllm", "transformers")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_open_requests",
    "preprocess_workers",
    "max_audio_s",
    "max_image_pixels",
    "max_video_frames",
    "max_video_pixels",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkerConfig:
    """How the thinker runs. Made from a flat mapping by ``options.from_mapping``.

    ``engine`` "auto": vLLM where it is installed in a version that is supported (any build of it), else transformers.
    ``vllm_args``: a JSON object of vLLM's AsyncEngineArgs, on top of what the other settings say
    ({"tensor_parallel_size": 2, "quantization": "fp8"}).
    ``dtype`` "auto": the checkpoint's; ``device`` "auto": the GPU where there is one; ``max_model_len`` 0: the
    checkpoint's context. ``max_num_seqs`` requests run at once, the others wait; above ``max_open_requests`` new ones
    are refused. The media limits hold for one file each: ``max_audio_s`` also for a video's track,
    ``max_video_pixels`` over all its sampled frames, taken at ``video_fps``. ``weights``: "checkpoint", or "random"
    ones of the checkpoint's shapes, for which config.json and the processor's files are enough.
    """

    engine: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int = 0
    max_open_requests: int = 1024
    preprocess_workers: int = 2
    max_audio_s: float = 600.0
    max_image_pixels: int = 50_000_000
    max_video_frames: int = 768
    max_video_pixels: int = 400_000_000
    video_fps: float = 2.0
    vllm_args: str = ""
    weights: str = "checkpoint"

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, ENGINES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("weights", self.weights, WEIGHTS)
        for name in _AT_LEAST_ONE:
            if not getattr(self, name) >= 1:
                raise InvalidRequestError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 0:
            raise InvalidRequestError("max_model_len", f"must be at least 0, got {self.max_model_len}")
        if not 0 < self.video_fps <= 30:
            raise InvalidRequestError("video_fps", f"must lie in (0, 30], got {self.video_fps:g}")


def _one_of(field: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise InvalidRequestError(field, f"must be one of {', '.join(accepted)}; got {value!r}")
