"""A checkpoint whose thinker does not fit is named at load, tensor by tensor."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.thinker.support import Media, request
from triton_omni.errors import CheckpointError, ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker
from triton_omni.thinker.prompt import PromptBuilder
from triton_omni.thinker.transformers_model import TransformersModel, modeling_qwen3_omni_moe


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


def tensors(copy: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file that holds the thinker's lm_head, and its tensors."""
    for file in copy.glob("*.safetensors"):
        held = load_file(file)
        if "thinker.lm_head.weight" in held:
            return file, held
    raise AssertionError("no thinker.lm_head.weight")


def test_an_older_transformers_is_named_before_it_stumbles_over_tensors(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(modeling_qwen3_omni_moe, "Qwen3OmniMoeThinkerModel")
    with pytest.raises(ConfigError, match=r"from 5\.21 on, this is \d") as raised:
        load_thinker(ModelConfig.load(checkpoint), ThinkerConfig(engine="transformers", device="cpu"))
    assert raised.value.field == "engine"


@pytest.mark.parametrize("fault", ["missing", "missing expert", "extra", "shape"])
def test_tensors_that_do_not_fit_are_named(copy: Path, fault: str) -> None:
    file, held = tensors(copy)
    name = "thinker.lm_head.weight"
    if fault == "missing":
        del held[name]
    elif fault == "missing expert":
        name = "mlp.experts.1.up_proj.weight"
        del held[f"thinker.model.layers.0.{name}"]
    elif fault == "extra":
        name = "thinker.model.layers.0.bogus.weight"
        held[name] = torch.zeros(3)
    else:
        held[name] = held[name][:, :-1].contiguous()
    save_file(held, file, {"format": "pt"})
    index = copy / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        kept = {key: value for key, value in content["weight_map"].items() if value != file.name}
        index.write_text(json.dumps(content | {"weight_map": kept | dict.fromkeys(held, file.name)}))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_thinker(ModelConfig.load(copy), ThinkerConfig(engine="transformers", device="cpu"))


def test_the_processor_must_be_there(copy: Path) -> None:
    for file in [*copy.glob("*processor*"), *copy.glob("tokenizer*")]:
        file.unlink()
    with pytest.raises(CheckpointError, match="processor"):
        load_thinker(ModelConfig.load(copy), ThinkerConfig(engine="transformers", device="cpu"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(checkpoint: Path, media: Media, dtype: str) -> None:
    model_config, config = ModelConfig.load(checkpoint), ThinkerConfig(device="cpu", dtype=dtype)
    model = TransformersModel(model_config, config)
    assert {str(p.dtype) for p in model._model.parameters()} == {f"torch.{dtype}"}
    content = [{"type": kind, "media": i} for i, kind in enumerate(("audio", "image", "video"))]
    what = request(content, media=(media.audio, media.image, media.video))
    placed = model.place(PromptBuilder(model_config, config).build(what))
    with torch.inference_mode():
        logits, state, rows = model.prefill(placed, want_rows=True)
        assert torch.isfinite(logits).all()
        assert torch.isfinite(model.decode(int(logits.argmax()), state)).all()
    assert rows is not None and rows.dtype == dtype
    hidden = model_config.thinker["text_config"]["hidden_size"]
    assert (
        rows.rows.size
        == torch.isin(torch.from_numpy(placed.encoded.token_ids).long(), model._media_ids).sum() * hidden * 2
    )
