"""Copies of a model repository with other parameters and instances: for deploy profiles, and for tests."""

from __future__ import annotations

import dataclasses
import py_compile
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from triton_omni.errors import ConfigError
from triton_omni.options import unknown_key_message

CONFIG = "config.pbtxt"
Kind = Literal["KIND_CPU", "KIND_GPU", "KIND_MODEL"]


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """One instance of a model, in an instance group of its own; ``gpu`` with KIND_GPU only."""

    kind: Kind
    gpu: int | None = None


def render(
    source: Path,
    target: Path,
    parameters: Mapping[str, Mapping[str, str]] | None = None,
    instances: Mapping[str, int | Sequence[Replica]] | None = None,
) -> Path:
    """Write ``source`` to ``target`` with changes; returns ``target``.

    ``parameters``: model -> parameter -> value; ``instances``: model -> ``count`` of its instance group, or its
    replicas. The models' files are linked, not copied, so that they find the package they lie beside.

    Raises: ConfigError when ``target`` has content already, or a model is not in ``source``.
    """
    models = sorted(config.parent.name for config in source.glob(f"*/{CONFIG}"))
    for name in (*(parameters or {}), *(instances or {})):
        if name not in models:
            raise ConfigError(unknown_key_message(name, models), field=f"model {name}")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty")
    for name in models:
        copy = target / name
        shutil.copytree(source / name, copy, ignore=lambda _, names: [n for n in names if n != CONFIG])
        for version in (source / name).iterdir():
            if version.is_dir():
                _link_version(version, copy / version.name)
        config = read_config(source / name)
        for key, value in (parameters or {}).get(name, {}).items():
            config.parameters[key].string_value = value
        wanted = (instances or {}).get(name)
        replicas = wanted if wanted is not None and not isinstance(wanted, int) else _replicas(config, wanted)
        if replicas:
            set_replicas(config, replicas)
        write_config(copy, config)
    return target


def set_replicas(config: Any, replicas: Mapping[int, Replica] | Sequence[Replica]) -> None:
    """Give a ModelConfig message one instance group per replica, named MODEL_NUMBER.

    Triton recognises an instance that it has by its group without the name. A host policy of its own makes each group
    different from the others, so that one can be taken out and the rest goes on as it is.
    """
    numbered = replicas.items() if isinstance(replicas, Mapping) else enumerate(replicas)
    del config.instance_group[:]
    for number, replica in numbered:
        name = f"{config.name}_{number}"
        group = config.instance_group.add(name=name, count=1, host_policy=name)
        group.kind = group.Kind.Value(replica.kind)
        if replica.gpu is not None:
            group.gpus.append(replica.gpu)


def _replicas(config: Any, count: int | None) -> list[Replica]:
    """Those of the file, ``count`` of each group if given; none when how many they are is for Triton to find out."""
    replicas: list[Replica] = []
    for group in config.instance_group:
        kind = group.Kind.Name(group.kind)
        if kind == "KIND_AUTO" or (kind == "KIND_GPU" and not group.gpus):
            return []
        gpus: list[int | None] = [*group.gpus] if kind == "KIND_GPU" else [None]
        replicas += [Replica(kind, gpu) for _ in range(count or max(group.count, 1)) for gpu in gpus]
    return replicas


def _link_version(source: Path, target: Path) -> None:
    """A directory with links in it, and with bytecode from the start: a reload would take a file that appears later for
    a change of the model, and replace all of its instances.
    """
    target.mkdir()
    for file in source.iterdir():
        if file.name != "__pycache__":
            (target / file.name).symlink_to(file.resolve())
    py_compile.compile(str(target / "model.py"), doraise=True)


def read_config(model: Path) -> Any:
    """The ModelConfig message of a model's directory, with the directory's name. Raises ConfigError."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = model / CONFIG
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path}: {error}") from None
    config.name = config.name or model.name
    return config


def write_config(model: Path, config: Any) -> None:
    """Write a ModelConfig message as config.pbtxt, at once: a server may be reading it."""
    from google.protobuf import text_format

    written = model / f"{CONFIG}.new"
    written.write_text(text_format.MessageToString(config), encoding="utf-8")
    written.replace(model / CONFIG)
