"""A deploy profile on a machine: the replicas and parameters of each Triton model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.errors import ConfigError, OmniError
from triton_omni.pipeline.null import NullCode2WavConfig, NullTalkerConfig, NullThinkerConfig
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.serve.machine import Machine
from triton_omni.serve.profile import STAGES, Profile
from triton_omni.serve.repository import Replica
from triton_omni.talker.config import TalkerConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.triton.bls_config import BlsConfig
from triton_omni.triton.parameters import DEVICES, NULL_ENGINE, NULL_PREFIX, Instance

MAX_REPLICAS = 64
_CONFIGS: Mapping[str, tuple[type, type]] = {
    "thinker": (ThinkerConfig, NullThinkerConfig),
    "talker": (TalkerConfig, NullTalkerConfig),
    "code2wav": (Code2WavConfig, NullCode2WavConfig),
}
_ELSEWHERE = {"device": "is set by devices", "checkpoint": "is set by --checkpoint", DEVICES: "is set by devices"}


@dataclasses.dataclass(frozen=True, slots=True)
class StageLayout:
    """``replicas`` None: as many as the repository has. ``cards``: the devices of each replica, empty where it has none
    or finds them itself. ``config``: the parameters as the stage's engine will read them; None with a null engine, and
    for omni_bls.
    """

    replicas: tuple[Replica, ...] | None
    cards: tuple[tuple[int, ...], ...]
    parameters: Mapping[str, str]
    config: Any = None


def lay_out(profile: Profile, machine: Machine) -> dict[str, StageLayout]:
    """Every stage's layout. Raises ConfigError naming stage and key, and what would be accepted."""
    return {stage: _stage(stage, dict(profile.stages.get(stage, {})), machine) for stage in STAGES}


def _stage(stage: str, settings: dict[str, Any], machine: Machine) -> StageLayout:
    for key, reason in _ELSEWHERE.items():
        if key in settings:
            raise ConfigError(reason, field=f"{stage}.{key}")
    devices = _devices(stage, settings.pop("devices", "auto"), machine)
    count = _count(stage, settings.pop("replicas", None), devices)
    cards = _cards(stage, devices, count or 1)
    if stage == "thinker":
        settings = _tensor_parallel(settings, len(cards[0]))
    parameters = {key: _text(stage, key, value) for key, value in settings.items()}
    config = _check(stage, parameters)
    if devices == "cpu":
        replicas = None if count is None else (Replica("KIND_CPU"),) * count
        return StageLayout(replicas, cards, parameters | ({} if stage == "omni_bls" else {"device": "cpu"}), config)
    if count is None or devices == "auto":
        return StageLayout((Replica("KIND_MODEL"),) * count if count else None, cards, parameters, config)
    if stage != "thinker" and machine.platform == "cuda":
        return StageLayout(tuple(Replica("KIND_GPU", gpu) for (gpu,) in cards), cards, parameters, config)
    # The thinker's engine takes the devices that it sees; and KIND_GPU is for NVIDIA's.
    parameters[DEVICES] = ";".join(",".join(map(str, card)) for card in cards)
    if machine.platform == "xpu" and stage != "thinker":
        parameters["device"] = "xpu"
    return StageLayout((Replica("KIND_MODEL"),) * count, cards, parameters, config)


def _devices(stage: str, value: Any, machine: Machine) -> str | list[int]:
    if stage == "omni_bls":
        if value not in ("auto", "cpu"):
            raise ConfigError(f"must be cpu or left out: it computes nothing, got {value!r}", field=f"{stage}.devices")
        return "cpu"
    if value in ("auto", "cpu"):
        return str(value)
    wanted = value if isinstance(value, list) else [value]
    if not wanted or not all(type(device) is int and device >= 0 for device in wanted):
        raise ConfigError(f"must be auto, cpu or a list of device numbers, got {value!r}", field=f"{stage}.devices")
    if len(set(wanted)) != len(wanted):
        raise ConfigError(f"names a device twice: {value!r}; replicas says how many share it", field=f"{stage}.devices")
    missing = [device for device in wanted if device >= len(machine.devices)]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not there; accepted are auto, cpu"
            + "".join(f", {index} ({device.name})" for index, device in enumerate(machine.devices)),
            field=f"{stage}.devices",
        )
    return wanted


def _count(stage: str, value: Any, devices: str | list[int]) -> int | None:
    """One replica per device, of the thinker one over all of them, unless the profile says how many."""
    if value is None:
        if isinstance(devices, str):
            return 1 if devices == "cpu" and stage != "omni_bls" else None
        return 1 if stage == "thinker" else len(devices)
    if type(value) is not int or not 1 <= value <= MAX_REPLICAS:
        raise ConfigError(f"must be an integer from 1 to {MAX_REPLICAS}, got {value!r}", field=f"{stage}.replicas")
    return value


def _cards(stage: str, devices: str | list[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each replica: equal shares, or equally many replicas on each."""
    if isinstance(devices, str):
        return ((),) * count
    each, rest = divmod(len(devices), count) if count <= len(devices) else divmod(count, len(devices))
    if rest or (stage != "thinker" and count < len(devices)):
        accepted = "a divisor or a multiple" if stage == "thinker" else "a multiple"
        raise ConfigError(
            f"must be {accepted} of the number of devices ({len(devices)}), got {count}", field=f"{stage}.replicas"
        )
    if count <= len(devices):
        return tuple(tuple(devices[i * each : (i + 1) * each]) for i in range(count))
    return tuple((devices[i % len(devices)],) for i in range(count))


def _tensor_parallel(settings: dict[str, Any], size: int) -> dict[str, Any]:
    """A thinker over several devices is vLLM's tensor parallelism."""
    arguments = settings.get("vllm_args", {})
    if not isinstance(arguments, dict):
        raise ConfigError(f"must be a mapping of vLLM's engine arguments, got {arguments!r}", field="thinker.vllm_args")
    given = arguments.get("tensor_parallel_size", max(size, 1))
    if size and given != size:
        raise ConfigError(
            f"must be {size}, the devices of a replica, or left out, got {given!r}",
            field="thinker.vllm_args.tensor_parallel_size",
        )
    if size > 1 and settings.get("engine") != "vllm":
        raise ConfigError(
            f"must be vllm for a replica over {size} devices, got {settings.get('engine', 'auto')!r}",
            field="thinker.engine",
        )
    if size > 1:
        arguments = arguments | {"tensor_parallel_size": size}
    return settings | {"vllm_args": arguments} if arguments else settings


def _text(stage: str, key: str, value: Any) -> str:
    """A YAML value as config.pbtxt has it."""
    if key == "engine" and value is None:
        return NULL_ENGINE  # YAML's null
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(_text(stage, key, item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value)
    if value is None:
        return "none"
    if not isinstance(value, str | int | float):
        raise ConfigError(f"must be a number, a word, a list or true or false, got {value!r}", field=f"{stage}.{key}")
    return str(value)


def _check(stage: str, parameters: Mapping[str, str]) -> Any:
    """What the stage itself will make of its parameters. Raises ConfigError naming the parameter."""
    instance = Instance(model=stage, name=stage, kind="MODEL", device_id=0, parameters=parameters)
    try:
        if stage == "omni_bls":
            instance.split_config(BlsConfig, PipelineConfig)
            return None
        real, null = _CONFIGS[stage]
        if not instance.uses_null_engine:
            return instance.config(real)
        instance.null_config(null)
        others = {k: v for k, v in parameters.items() if k != "engine" and not k.startswith(NULL_PREFIX)}
        dataclasses.replace(instance, parameters=others).config(real)
        return None
    except ConfigError:
        raise
    except OmniError as error:
        raise ConfigError(error.message, field=f"{stage}: parameter {error.field}") from None
