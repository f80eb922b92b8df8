"""Tensors of a checkpoint: read lazily by name or prefix from one or many safetensors files, loaded strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from triton_omni.errors import CheckpointError
from triton_omni.model_config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Rename: TypeAlias = Callable[[str], str | None]

# Published checkpoints hold one matrix per expert; modules that fuse them stack these parts along dim 0 of each expert.
_FUSED_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


class Checkpoint:
    """The safetensors of ``config.path``: ``model.safetensors.index.json`` with its shards, or ``model.safetensors``.

    Raises: CheckpointError when neither exists, or a file cannot be read.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.path = config.path
        self._files = _files_by_tensor(config.path)
        self._open: dict[Path, Any] = {}

    def names(self, prefix: str = "") -> list[str]:
        """Full names of all tensors that begin with ``prefix``, sorted."""
        return sorted(name for name in self._files if name.startswith(prefix))

    def tensor(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """One tensor; ``dtype`` applies to floating-point tensors, None keeps the stored one.

        Raises: CheckpointError when the checkpoint does not hold it.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            value: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot read tensor {name!r}: {error}") from None
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    def load(
        self,
        module: nn.Module,
        prefix: str,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        rename: Rename | None = None,
    ) -> None:
        """Give every parameter and persistent buffer of ``module`` its tensor; the module may be on ``meta``.

        The tensor ``prefix + name`` becomes the module's ``name``, or ``rename(name)``; a name renamed to None is left
        to another module. Fused ``experts.gate_up_proj`` [E, 2 * intermediate, hidden] and ``experts.down_proj``
        [E, hidden, intermediate] are stacked from ``experts.N.{gate,up,down}_proj.weight`` where the checkpoint
        holds those.

        Raises: CheckpointError naming every tensor that is missing, left over, or of another shape.
        """
        sources = {new: full for full, new in self._renamed(prefix, rename)}
        used: set[str] = set()
        missing: list[str] = []
        misshapen: list[str] = []
        state: dict[str, Tensor] = {}
        for name, target in module.state_dict().items():
            parts = _parts(name, target, sources)
            absent = [part for part in parts if part not in sources]
            if absent:
                missing += [prefix + part for part in absent]
                continue
            used.update(parts)
            value = self._assemble([sources[part] for part in parts], fused=parts != [name], experts=len(target))
            if value is None or value.shape != target.shape:
                found = "parts that do not stack" if value is None else list(value.shape)
                misshapen.append(f"{prefix}{name} (must be {list(target.shape)}, got {found})")
                continue
            state[name] = value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        extra = [sources[name] for name in sources.keys() - used]
        _raise_if_any(self.path, {"missing": missing, "unexpected": extra, "of the wrong shape": misshapen})
        module.load_state_dict(state, strict=True, assign=True)

    def _renamed(self, prefix: str, rename: Rename | None) -> Iterator[tuple[str, str]]:
        for full in self.names(prefix):
            name = full.removeprefix(prefix)
            new = rename(name) if rename else name
            if new is not None:
                yield full, new

    def _assemble(self, names: list[str], *, fused: bool, experts: int) -> Tensor | None:
        """The one tensor, or E experts' parts as [E, rows of all parts, columns]; None if they do not fit together."""
        values = [self.tensor(name) for name in names]
        if not fused:
            return values[0]
        if len({value.shape for value in values}) != 1:
            return None
        return torch.stack(values).reshape(experts, -1, values[0].shape[-1])


def _parts(name: str, target: Tensor, sources: Mapping[str, str]) -> list[str]:
    """Names of the tensors that make up ``name``: itself, or those of all its experts in order."""
    if name not in sources:
        for suffix, projections in _FUSED_EXPERTS.items():
            if re.search(rf"(^|\.){re.escape(suffix)}$", name):
                stem = name.removesuffix(suffix)
                return [f"{stem}experts.{e}.{p}.weight" for e in range(len(target)) for p in projections]
    return [name]


def _files_by_tensor(path: Path) -> dict[str, Path]:
    index = path / INDEX_FILE
    if not index.exists():
        file = path / SINGLE_FILE
        return dict.fromkeys(_tensor_names(file), file)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): path / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: must be JSON with a 'weight_map' of tensor to file: {error!r}") from None
    for file in sorted(set(files.values())):
        listed, held = {name for name, where in files.items() if where == file}, _tensor_names(file)
        _raise_if_any(file, {"missing": listed - held, "not in the index": held - listed})
    return files


def _tensor_names(file: Path) -> set[str]:
    if not file.exists():
        raise CheckpointError(f"{file} does not exist")
    try:
        with safe_open(file, framework="pt") as tensors:
            return set(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from None


def _raise_if_any(where: Path, faults: Mapping[str, set[str] | list[str]]) -> None:
    told = [f"{what}: {', '.join(sorted(names))}" for what, names in faults.items() if names]
    if told:
        raise CheckpointError(f"{where}: tensors {'; '.join(told)}")
