"""From a checkpoint to a running talker."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from triton_omni.checkpoint import Checkpoint
from triton_omni.device import is_lost
from triton_omni.errors import CheckpointError, ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.talker.config import MAX_GRAPHED_ROWS, TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.memory import MemoryPlan
from triton_omni.talker.model import Talker
from triton_omni.talker.random_weights import random_talker
from triton_omni.talker.runner import Runner, TalkerRunner
from triton_omni.talker.shape import TalkerShape
from triton_omni.talker.slots import Slots

logger = logging.getLogger(__name__)

THINKER_EMBEDDINGS = "thinker.model.embed_tokens.weight"


def load_talker(
    model_config: ModelConfig, config: TalkerConfig, on_death: Callable[[], None] = lambda: None
) -> LocalTalkerEngine:
    """A talker engine on the checkpoint's weights. ``on_death`` is called when its device has failed for good; its
    sessions have ended with an error by then.

    Raises: CheckpointError when config.json or the tensors do not fit, ConfigError when ``config`` does not.
    """
    lost = partial(is_lost, config.torch_device())
    return LocalTalkerEngine(load_runner(model_config, config), config, is_lost=lost, on_death=on_death)


def load_runner(model_config: ModelConfig, config: TalkerConfig) -> Runner:
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
    graphed = wants_graphs(shape, config, device)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        MemoryPlan.of(shape, config, dtype, graphed=graphed).check(free_bytes, device)
    if config.weights == "random":
        talker = random_talker(shape, device, dtype)
    else:
        talker = _talker_of(model_config, shape, device, dtype)
    logger.info(
        "talker loaded on %s as %s in %.1f s, weights: %s", device, dtype, time.monotonic() - began_s, config.weights
    )
    return make_runner(talker, config, device, dtype, graphed=graphed)


def _talker_of(model_config: ModelConfig, shape: TalkerShape, device: torch.device, dtype: torch.dtype) -> Talker:
    """Prepared, with the checkpoint's weights."""
    checkpoint = Checkpoint(model_config)
    with torch.device("meta"):
        talker = Talker(shape)
    checkpoint.load(talker, "talker.", dtype=dtype, device=device)
    talker.to(device).eval().requires_grad_(False)
    talker.prepare(checkpoint.tensor(THINKER_EMBEDDINGS))
    return talker


def make_runner(
    talker: Talker, config: TalkerConfig, device: torch.device, dtype: torch.dtype, *, graphed: bool
) -> Runner:
    """Slots for ``talker``, and the runner that works on them."""
    began_s = time.monotonic()
    slots = Slots(talker.shape, config.max_sessions, config.max_context, device, dtype)
    logger.info(
        "talker: %d slots of %d rows, %.0f MiB of KV cache",
        *(config.max_sessions, config.max_context, slots.kv.nbytes / 2**20),
    )
    if not graphed:
        return TalkerRunner(talker, slots)
    from triton_omni.talker.graphs import GraphedRunner  # late: it loads Triton's compiler

    runner = GraphedRunner(talker, slots, config.row_buckets(), config.prefill_chunk)
    logger.info("talker: all graphs captured in %.1f s", time.monotonic() - began_s)
    return runner


def wants_graphs(shape: TalkerShape, config: TalkerConfig, device: torch.device) -> bool:
    """Whether steps are CUDA graphs of fused kernels. Raises ConfigError when they must be and cannot."""
    if config.cuda_graph is False or (config.cuda_graph is None and device.type != "cuda"):
        return False
    obstacle = _obstacle(shape, device)
    if obstacle is None:
        if config.prefill_chunk > MAX_GRAPHED_ROWS:
            raise ConfigError(
                f"must be at most {MAX_GRAPHED_ROWS} with cuda_graph, got {config.prefill_chunk}",
                field="talker.prefill_chunk",
            )
        return True
    if config.cuda_graph:
        raise ConfigError(f"cannot be true: {obstacle}", field="talker.cuda_graph")
    logger.warning("talker runs without CUDA graphs, many times slower: %s", obstacle)
    return False


def _obstacle(shape: TalkerShape, device: torch.device) -> str | None:
    """What the fused kernels lack."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and the talker runs on {device}"
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton (OpenAI's compiler, which comes with PyTorch for CUDA)"
    for name, decoder in (("text_config", shape.backbone), ("code_predictor_config", shape.predictor)):
        if decoder.attention_bias:
            return f"it needs {name}.attention_bias false"
        if decoder.head_dim < 32 or decoder.head_dim.bit_count() != 1:
            return f"it needs a {name}.head_dim that is a power of 2 from 32 on, and got {decoder.head_dim}"
    if shape.predictor.hidden != shape.backbone.hidden:
        return f"it needs one hidden_size, and got {shape.backbone.hidden} and {shape.predictor.hidden}"
    return None
