"""One engine on the demo checkpoint for the thinker's tests, and the media they send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.thinker.support import Media, make_media
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.load(checkpoint)


@pytest.fixture(scope="session")
def engine(model_config: ModelConfig) -> Iterator[ThinkerEngine]:
    """float32 on CPU, 8 at once."""
    thinker = load_thinker(model_config, ThinkerConfig(dtype="float32", device="cpu", max_num_seqs=8))
    yield thinker
    assert thinker.stats() == {"running": 0, "waiting": 0}
    thinker.close()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


@pytest.fixture(scope="session")
def media() -> Media:
    return make_media()
