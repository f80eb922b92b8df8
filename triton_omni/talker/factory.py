"""From a checkpoint to a running talker."""

from __future__ import annotations

import logging
import time

import torch

from triton_omni.checkpoint import Checkpoint
from triton_omni.errors import CheckpointError, ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.model import Talker
from triton_omni.talker.runner import TalkerRunner
from triton_omni.talker.shape import TalkerShape
from triton_omni.talker.slots import Slots

logger = logging.getLogger(__name__)

THINKER_EMBEDDINGS = "thinker.model.embed_tokens.weight"


def load_talker(model_config: ModelConfig, config: TalkerConfig) -> LocalTalkerEngine:
    """A talker engine on the checkpoint's weights.

    Raises: CheckpointError when config.json or the tensors do not fit, ConfigError when ``config`` does not.
    """
    return LocalTalkerEngine(load_runner(model_config, config), config)


def load_runner(model_config: ModelConfig, config: TalkerConfig) -> TalkerRunner:
    """The network and its slots, without a thread."""
    if not model_config.speaks:
        raise CheckpointError(f"{model_config.path}: this checkpoint has no talker (enable_audio_output is off)")
    shape = TalkerShape.read(model_config)
    if config.max_context > shape.max_positions:
        raise ConfigError(
            f"must be at most the checkpoint's max_position_embeddings {shape.max_positions}, got {config.max_context}",
            field="talker.max_context",
        )
    began_s = time.monotonic()
    device = config.torch_device()
    dtype = config.torch_dtype(device)
    checkpoint = Checkpoint(model_config)
    with torch.device("meta"):
        talker = Talker(shape)
    checkpoint.load(talker, "talker.", dtype=dtype, device=device)
    talker.to(device).eval().requires_grad_(False)
    talker.prepare(checkpoint.tensor(THINKER_EMBEDDINGS))
    slots = Slots(shape, config.max_sessions, config.max_context, device, dtype)
    logger.info(
        "talker loaded on %s as %s in %.1f s: %d slots of %d rows, %.0f MiB of KV cache",
        *(device, dtype, time.monotonic() - began_s, config.max_sessions, config.max_context),
        slots.kv.nbytes / 2**20,
    )
    return TalkerRunner(talker, slots)
