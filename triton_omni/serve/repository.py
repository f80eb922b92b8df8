"""Copies of a model repository with other parameters: for tests, and for layouts over several GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_omni.errors import ConfigError
from triton_omni.options import unknown_key_message

CONFIG = "config.pbtxt"


def render(
    source: Path,
    target: Path,
    parameters: Mapping[str, Mapping[str, str]] | None = None,
    instances: Mapping[str, int] | None = None,
) -> Path:
    """Write ``source`` to ``target`` with changes; returns ``target``.

    ``parameters``: model -> parameter -> value; ``instances``: model -> ``count`` of its instance group. The models'
    code is linked, not copied, so that it finds the package it lies beside.

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
                (copy / version.name).symlink_to(version.resolve(), target_is_directory=True)
        config = read_config(source / name)
        for key, value in (parameters or {}).get(name, {}).items():
            config.parameters[key].string_value = value
        for group in config.instance_group:
            group.count = (instances or {}).get(name, group.count)
        write_config(copy, config)
    return target


def read_config(model: Path) -> Any:
    """The ModelConfig message of a model's directory. Raises ConfigError."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = model / CONFIG
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_config(model: Path, config: Any) -> None:
    """Write a ModelConfig message as config.pbtxt."""
    from google.protobuf import text_format

    (model / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
