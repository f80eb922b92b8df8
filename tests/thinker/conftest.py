"""Both engines on the demo checkpoint for the thinker's tests, and the media they send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.thinker.support import Media, make_media, start_vllm
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.transformers_engine import TransformersThinker


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.load(checkpoint)


@pytest.fixture(scope="session")
def transformers_engine(model_config: ModelConfig) -> Iterator[TransformersThinker]:
    """float32 on CPU, 8 at once."""
    thinker = TransformersThinker(model_config, ThinkerConfig(dtype="float32", device="cpu", max_num_seqs=8))
    yield thinker
    assert thinker.stats() == {"running": 0, "waiting": 0}
    thinker.close()


@pytest.fixture(scope="session")
def vllm_engine(model_config: ModelConfig) -> Iterator[ThinkerEngine]:
    """The same on vLLM, whose prefix cache is on."""
    thinker = start_vllm(model_config)
    yield thinker
    assert thinker.stats() == {"running": 0, "waiting": 0}
    thinker.close()


@pytest.fixture(scope="session", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> ThinkerEngine:
    """Both engines, one after the other: what a test asks of one holds for the other."""
    thinker: ThinkerEngine = request.getfixturevalue(f"{request.param}_engine")
    return thinker


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


@pytest.fixture(scope="session")
def media() -> Media:
    return make_media()
