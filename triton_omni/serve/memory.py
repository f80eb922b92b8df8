"""Whether the stages that share a GPU fit on it together, by what their engines know of their needs. Imports torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.serve.layout import StageLayout
from triton_omni.serve.machine import Device, Machine
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.factory import wants_graphs
from triton_omni.talker.memory import MemoryPlan as TalkerMemory
from triton_omni.talker.shape import TalkerShape
from triton_omni.thinker.config import ThinkerConfig

CONTEXT_BYTES = 640 << 20  # what a process takes of a GPU before it has done anything: 520 to 630 MB were seen
_CUDA = torch.device("cuda")


def shared_devices(layouts: Mapping[str, StageLayout], machine: Machine) -> dict[int, list[str]]:
    """Device -> the stages with a replica on it, one entry per replica, where there are several."""
    stages: dict[int, list[str]] = {}
    for stage, layout in layouts.items():
        finds_them = layout.parameters.get("device") != "cpu" and bool(machine.devices)
        for card in layout.cards if layout.config is not None else ():
            for device in card or ((0,) if finds_them else ()):
                stages.setdefault(device, []).append(stage)
    return {device: users for device, users in sorted(stages.items()) if len(users) > 1}


def check_memory(layouts: Mapping[str, StageLayout], machine: Machine, checkpoint: Path) -> list[str]:
    """The sum of each shared GPU as a line to log. A stage whose need is not known counts nothing.

    Raises: ConfigError with the arithmetic when a GPU is too small.
    """
    model_config = ModelConfig.load(checkpoint)
    lines = []
    for index, users in shared_devices(layouts, machine).items():
        device = machine.devices[index]
        if device.memory_bytes is None:
            continue
        needs = [(stage, _need(layouts[stage], model_config, device)) for stage in users]
        total = sum(need + CONTEXT_BYTES for _, need in needs)
        terms = " + ".join(f"{stage} {_gib(need)}" for stage, need in needs)
        line = (
            f"device {index} ({device.name}): {terms} + {len(needs)} processes {_gib(len(needs) * CONTEXT_BYTES)} = "
            f"{_gib(total)} of {_gib(device.memory_bytes)}"
        )
        if total > device.memory_bytes:
            raise ConfigError(
                f"{line}: lower thinker.vllm_args.gpu_memory_utilization, max_sessions or the talker's max_context, or "
                "move a stage to another device",
                field="devices",
            )
        lines.append(line)
    return lines


def _need(layout: StageLayout, model_config: ModelConfig, device: Device) -> int:
    """Bytes of one replica, its process's own left out; 0 where the engine does not know."""
    config = layout.config
    if isinstance(config, ThinkerConfig):
        return _thinker_need(config, device)
    if not model_config.speaks:
        return 0  # talker and code2wav load nothing
    if isinstance(config, TalkerConfig):
        shape = TalkerShape.read(model_config)
        dtype = config.torch_dtype(_CUDA)
        return TalkerMemory.of(shape, config, dtype, graphed=wants_graphs(shape, config, _CUDA)).total
    if isinstance(config, Code2WavConfig):
        return _code2wav_need(config, model_config)
    return 0


def _thinker_need(config: ThinkerConfig, device: Device) -> int:
    """vLLM takes its share of the whole device, and must be told one where it is not alone."""
    if config.engine == "transformers" or (config.engine == "auto" and importlib.util.find_spec("vllm") is None):
        return 0
    share = json.loads(config.vllm_args or "{}").get("gpu_memory_utilization")
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ConfigError(
            f"must be given, above 0 and at most 1, where the thinker shares a device, got {share!r}",
            field="thinker.vllm_args.gpu_memory_utilization",
        )
    return int(share * (device.memory_bytes or 0))


def _code2wav_need(config: Code2WavConfig, model_config: ModelConfig) -> int:
    if config.torch_dtype(_CUDA).itemsize != 2 or importlib.util.find_spec("triton") is None:
        return 0
    from triton_omni.code2wav.buckets import buckets
    from triton_omni.code2wav.memory import MemoryPlan  # late: it loads Triton's compiler

    shape = Code2WavShape.from_config(model_config.code2wav)
    shapes = buckets(config.max_sessions, config.step_frames(_CUDA))
    return MemoryPlan.of(shape, config.torch_dtype(_CUDA), config.max_sessions, shapes).total


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
