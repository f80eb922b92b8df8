"""From a checkpoint to a running code2wav engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from triton_omni.checkpoint import Checkpoint
from triton_omni.code2wav.buckets import buckets
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.random_weights import random_code2wav
from triton_omni.code2wav.runner import RowDecoder, Runner
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.device import is_lost
from triton_omni.errors import CheckpointError
from triton_omni.model_config import ModelConfig

PREFIX = "code2wav."

logger = logging.getLogger(__name__)


def load_code2wav(
    model_config: ModelConfig, config: Code2WavConfig | None = None, on_death: Callable[[], None] = lambda: None
) -> StreamingEngine:
    """The engine of the checkpoint's code2wav. ``on_death`` is called, from within ``decode``, when its device has
    failed for good. Raises CheckpointError or ConfigError.
    """
    config = config or Code2WavConfig()
    began_s = time.monotonic()
    shape = Code2WavShape.from_config(model_config.code2wav)
    if shape.code_groups != model_config.code_groups:
        raise CheckpointError(
            f"the talker makes {model_config.code_groups} code groups, code2wav reads {shape.code_groups}"
        )
    device = config.torch_device()
    dtype = config.torch_dtype(device)
    runner: RowDecoder
    if dtype.itemsize == 2:
        runner = _fused_runner(model_config, shape, config, device, dtype)
    else:
        model = load_model(model_config, shape, config.max_sessions, device, dtype, weights=config.weights)
        logger.info("code2wav: %d slots of %.2f MiB", config.max_sessions, model.slot_bytes / 2**20)
        runner = Runner(model, config.step_frames(device))
    logger.info("code2wav: %s on %s, loaded in %.1f s", dtype, device, time.monotonic() - began_s)
    return StreamingEngine(
        runner,
        max_sessions=config.max_sessions,
        idle_timeout_s=config.idle_timeout_s,
        is_lost=partial(is_lost, device),
        on_death=on_death,
    )


def _fused_runner(
    model_config: ModelConfig, shape: Code2WavShape, config: Code2WavConfig, device: torch.device, dtype: torch.dtype
) -> RowDecoder:
    from triton_omni.code2wav.fidelity import signal_to_noise_db  # late: triton comes with CUDA builds of torch only
    from triton_omni.code2wav.fused import FusedDecoder
    from triton_omni.code2wav.graphs import FusedRunner
    from triton_omni.code2wav.memory import MemoryPlan
    from triton_omni.code2wav.packing import PackedCode2Wav

    shapes = buckets(config.max_sessions, config.step_frames(device))
    memory = MemoryPlan.of(shape, dtype, config.max_sessions, shapes)
    logger.info("code2wav: %s", memory)
    with torch.cuda.device(device):
        memory.check(torch.cuda.mem_get_info()[0], device)
        model = load_model(model_config, shape, 1, device, torch.float32, weights=config.weights)
        packed = PackedCode2Wav(model, dtype, device)
        ratio_db = signal_to_noise_db(model, packed)
        logger.info("code2wav: %s is %.1f dB from float32, on random codes", dtype, ratio_db)
        del model
        torch.cuda.empty_cache()
        graphed = config.cuda_graph is not False
        return FusedRunner(FusedDecoder(packed, config.max_sessions + 1, shapes), cuda_graph=graphed)


def load_model(
    model_config: ModelConfig,
    shape: Code2WavShape,
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    weights: str = "checkpoint",
) -> StreamingCode2Wav:
    """The decoder with ``slots`` empty slots, on the checkpoint's weights or on random ones (see Code2WavConfig)."""
    if weights == "random":
        random = random_code2wav(shape, device, slots).to(dtype)
        random.prepare(slots)  # again: what it keeps is of the weights' dtype
        return random
    with torch.device("meta"):
        model = StreamingCode2Wav(shape)
    Checkpoint(model_config).load(model, PREFIX, dtype=dtype, device=device)
    model.prepare(slots)
    return model.eval()
