"""From a checkpoint to a running code2wav engine."""

from __future__ import annotations

import logging
import time

import torch

from triton_omni.checkpoint import Checkpoint
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.runner import Runner
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.errors import CheckpointError
from triton_omni.model_config import ModelConfig

PREFIX = "code2wav."

logger = logging.getLogger(__name__)


def load_code2wav(model_config: ModelConfig, config: Code2WavConfig | None = None) -> StreamingEngine:
    """The engine of the checkpoint's code2wav. Raises CheckpointError or ConfigError."""
    config = config or Code2WavConfig()
    began_s = time.monotonic()
    shape = Code2WavShape.from_config(model_config.code2wav)
    if shape.code_groups != model_config.code_groups:
        raise CheckpointError(
            f"the talker makes {model_config.code_groups} code groups, code2wav reads {shape.code_groups}"
        )
    device = config.torch_device()
    model = load_model(model_config, shape, config.max_sessions, device, config.torch_dtype)
    logger.info(
        "code2wav: %s on %s, %d slots of %.2f MiB, loaded in %.1f s",
        config.dtype,
        device,
        config.max_sessions,
        model.slot_bytes / 2**20,
        time.monotonic() - began_s,
    )
    runner = Runner(model, config.step_frames(device))
    return StreamingEngine(runner, max_sessions=config.max_sessions, idle_timeout_s=config.idle_timeout_s)


def load_model(
    model_config: ModelConfig, shape: Code2WavShape, slots: int, device: torch.device, dtype: torch.dtype
) -> StreamingCode2Wav:
    """The decoder with the checkpoint's weights and ``slots`` empty slots."""
    with torch.device("meta"):
        model = StreamingCode2Wav(shape)
    Checkpoint(model_config).load(model, PREFIX, dtype=dtype, device=device)
    model.prepare(slots)
    return model.eval()
