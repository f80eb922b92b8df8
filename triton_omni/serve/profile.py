"""Deploy profiles: a YAML file that says which stage runs where and how, merged with what the machine asks for.

::

    description: what this layout is for
    thinker:                     the same for talker and code2wav
      devices: [0]               numbers of accelerators, "cpu", or "auto"
      replicas: 1
      max_num_seqs: 64           any parameter of the stage's config.pbtxt; vllm_args as a mapping
    omni_bls:
      replicas: 2
    platforms:                   merged over the above on that platform: cuda, rocm, xpu, cpu
      rocm: {code2wav: {cuda_graph: false}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from triton_omni.errors import ConfigError
from triton_omni.options import unknown_key_message
from triton_omni.serve.machine import PLATFORMS, Machine, Platform

DIRECTORY = Path(__file__).resolve().parents[2] / "deploy"
STAGES = ("thinker", "talker", "code2wav", "omni_bls")
_KEYS = (*STAGES, "description", "platforms")
_MAPPINGS = ("vllm_args",)  # the values of a stage that are mappings themselves
_BY_DEVICES = ("cpu-demo", "one-gpu", "two-gpus", "three-gpus")


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """``stages``: stage -> its settings as YAML gives them, platform and overrides merged in."""

    name: str
    path: Path
    stages: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(cls, name: str, platform: Platform, overrides: Sequence[str] = ()) -> Profile:
        """``name`` of a file in deploy/, or a path; each override is ``stage.key=value`` with a YAML value.

        Raises: ConfigError naming the file and the key.
        """
        path = find(name)
        content = _read(path)
        deltas = _mapping(content, "platforms", path)
        for known in deltas:
            if known not in PLATFORMS:
                raise ConfigError(unknown_key_message(str(known), PLATFORMS), field=f"{path}: platforms.{known}")
        merged = {stage: _mapping(content, stage, path) for stage in STAGES}
        delta = _mapping(deltas, platform, path)
        _check_keys(delta, STAGES, f"{path}: platforms.{platform}.")
        merged = _merge(merged, {stage: _mapping(delta, stage, path) for stage in delta})
        for override in overrides:
            merged = _merge(merged, parse_override(override))
        return cls(path.stem, path, merged)

    def __str__(self) -> str:
        """As YAML, without stages that have no settings."""
        stages = {stage: dict(settings) for stage, settings in self.stages.items() if settings}
        text: str = yaml.safe_dump(stages, sort_keys=False, default_flow_style=None)
        return text.rstrip()


def default_name(machine: Machine) -> str:
    """The shipped profile for so many devices."""
    return _BY_DEVICES[min(len(machine.devices), len(_BY_DEVICES) - 1)]


def names() -> list[str]:
    """The shipped profiles."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def find(name: str) -> Path:
    """A path as it is, a bare name in deploy/. Raises ConfigError when there is no such file."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and path.parent == Path():
        path = DIRECTORY / f"{name}.yaml"
        if not path.exists():
            raise ConfigError(f"{unknown_key_message(name, names())}; or the path of a .yaml file", field="--profile")
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; shipped are {', '.join(names())}", field="--profile")
    return path


def parse_override(text: str) -> dict[str, Any]:
    """``talker.max_sessions=16`` as the nested mapping that it stands for. Raises ConfigError."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"must be stage.key=value, got {text!r}", field="--set")
    if parts[0] not in STAGES:
        raise ConfigError(unknown_key_message(parts[0], STAGES), field=f"--set {key}")
    if len(parts) > 2 and (len(parts) > 3 or parts[1] not in _MAPPINGS):
        raise ConfigError(f"must be stage.key=value; only {', '.join(_MAPPINGS)} has keys below", field=f"--set {key}")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"must have a YAML value, got {value!r}", field=f"--set {key}") from None
    for part in reversed(parts):
        nested = {part: nested}
    result: dict[str, Any] = nested
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="--profile") from None
    if not isinstance(content, dict):
        raise ConfigError(f"must be a mapping with the keys {', '.join(_KEYS)}", field=str(path))
    _check_keys(content, _KEYS, f"{path}: ")
    return content


def _check_keys(content: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise ConfigError(unknown_key_message(str(key), known), field=f"{where}{key}")


def _mapping(content: Mapping[Any, Any], key: str, path: Path) -> dict[str, Any]:
    value = content.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"must be a mapping, got {value!r}", field=f"{path}: {key}")
    return value


def _merge(base: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """``delta`` over ``base``; mappings are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in delta.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
