"""Checkpoint: both file layouts, strictness, and stacking of per-expert weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from triton_omni.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from triton_omni.errors import CheckpointError
from triton_omni.model_config import ModelConfig

EXPERTS, HIDDEN, INTERMEDIATE = 3, 4, 6


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTERMEDIATE))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, 2)
        self.experts = Experts()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {"part.proj.weight": torch.randn(2, HIDDEN), "part.proj.bias": torch.randn(2), "other.x": torch.randn(3)}
    for e in range(EXPERTS):
        found[f"part.experts.{e}.gate_proj.weight"] = torch.randn(INTERMEDIATE, HIDDEN)
        found[f"part.experts.{e}.up_proj.weight"] = torch.randn(INTERMEDIATE, HIDDEN)
        found[f"part.experts.{e}.down_proj.weight"] = torch.randn(HIDDEN, INTERMEDIATE)
    return found | {"part.steps": torch.tensor([1, 2])}


def written(path: Path, content: dict[str, torch.Tensor], shards: int = 1) -> Checkpoint:
    names = sorted(content)
    files = [SINGLE_FILE] if shards == 1 else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({name: content[name] for name in names[i::shards]}, path / file)
    if shards > 1:
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return opened(path)


def opened(path: Path) -> Checkpoint:
    return Checkpoint(ModelConfig(path=path, raw={}, generation={}))


def loaded(checkpoint: Checkpoint, **options: object) -> Block:
    with torch.device("meta"):
        module = Block()
    checkpoint.load(module, "part.", dtype=torch.float32, **options)  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize("shards", [1, 3])
def test_loads_single_file_and_shards(tmp_path: Path, shards: int) -> None:
    content = tensors()
    module = loaded(written(tmp_path, content, shards))
    assert torch.equal(module.proj.weight, content["part.proj.weight"]) and torch.equal(
        module.steps, torch.tensor([1, 2])
    )
    gate, up = (content[f"part.experts.1.{p}_proj.weight"] for p in ("gate", "up"))
    assert torch.equal(module.experts.gate_up_proj[1], torch.cat([gate, up]))
    assert torch.equal(module.experts.down_proj[2], content["part.experts.2.down_proj.weight"])


def test_fused_experts_load_as_they_are(tmp_path: Path) -> None:
    content = {name: value for name, value in tensors().items() if ".experts." not in name}
    content["part.experts.gate_up_proj"] = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    content["part.experts.down_proj"] = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    module = loaded(written(tmp_path, content))
    assert torch.equal(module.experts.gate_up_proj, content["part.experts.gate_up_proj"])


def test_dtype_converts_floats_only(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Block()
    written(tmp_path, tensors()).load(module, "part.", dtype=torch.bfloat16)
    assert module.proj.weight.dtype == module.experts.down_proj.dtype == torch.bfloat16
    assert module.steps.dtype == torch.int64


def test_names_and_tensor(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, tensors(), 2)
    assert checkpoint.names("part.proj") == ["part.proj.bias", "part.proj.weight"]
    assert torch.equal(checkpoint.tensor("other.x"), tensors()["other.x"])
    with pytest.raises(CheckpointError, match=r"no tensor 'other\.y'"):
        checkpoint.tensor("other.y")


def test_rename_maps_names_and_leaves_tensors_to_others(tmp_path: Path) -> None:
    content = tensors()
    content["part.linear.weight"] = content.pop("part.proj.weight")
    content["part.inner.x"] = torch.randn(1)

    def rename(name: str) -> str | None:
        return None if name.startswith("inner.") else name.replace("linear.", "proj.")

    module = loaded(written(tmp_path, content), rename=rename)
    assert torch.equal(module.proj.weight, content["part.linear.weight"])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.pop("part.proj.bias"), r"missing: part\.proj\.bias"),
        (lambda c: c.pop("part.experts.1.up_proj.weight"), r"missing: part\.experts\.1\.up_proj\.weight"),
        (lambda c: c.update({"part.scale": torch.zeros(1)}), r"unexpected: part\.scale"),
        (
            lambda c: c.update({f"part.experts.{EXPERTS}.up_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN)}),
            r"unexpected: part\.experts\.3\.up_proj\.weight",
        ),
        (lambda c: c.update({"part.proj.bias": torch.zeros(5)}), r"part\.proj\.bias \(must be \[2\], got \[5\]\)"),
        (
            lambda c: c.update({"part.experts.0.down_proj.weight": torch.zeros(9, INTERMEDIATE)}),
            r"of the wrong shape: part\.experts\.down_proj",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change, message: str) -> None:
    content = tensors()
    change(content)
    with pytest.raises(CheckpointError, match=message):
        loaded(written(tmp_path, content))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        opened(tmp_path)


def test_not_safetensors(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        opened(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_bad_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="weight_map"):
        opened(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    written(tmp_path, tensors(), 2)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["part.ghost"] = index["weight_map"].pop("other.x")
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"missing: part\.ghost; not in the index: other\.x"):
        opened(tmp_path)
    (tmp_path / index["weight_map"]["part.ghost"]).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        opened(tmp_path)
