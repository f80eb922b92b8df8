"""``weights: random``: every stage runs on a directory without a tensor in it, at the checkpoint's shapes."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.thinker.support import Answered
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.factory import load_code2wav
from triton_omni.errors import CheckpointError, ConfigError, InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import CodesChunk, ThinkerRequest
from triton_omni.sampling import ThinkerSampling
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.factory import load_runner
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker


@pytest.fixture(scope="module")
def weightless(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """The demo checkpoint's configuration, tokenizer and processor."""
    path = tmp_path_factory.mktemp("shape") / "weightless"
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    return ModelConfig.load(path)


def test_talker(weightless: ModelConfig) -> None:
    small = {"device": "cpu", "max_sessions": 1, "max_context": 64}
    runner = load_runner(weightless, TalkerConfig(**small, weights="random"))
    assert runner.slots.kv.shape[-1] == weightless.talker["text_config"]["head_dim"]
    with pytest.raises(CheckpointError, match="safetensors does not exist"):
        load_runner(weightless, TalkerConfig(**small))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_code2wav(weightless: ModelConfig, dtype: str) -> None:
    engine = load_code2wav(weightless, Code2WavConfig(max_sessions=1, device="cpu", dtype=dtype, weights="random"))
    codes = np.random.default_rng(0).integers(0, 2048, (6, weightless.code_groups), np.int32)
    [wave] = engine.decode([CodesChunk("a", codes, start=True, end=True)])
    assert isinstance(wave, np.ndarray) and wave.size == 6 * 1920 - 555
    assert 300 < wave.astype(float).std() < 30_000  # heard, and not clipped
    engine.close()


@pytest.mark.parametrize(
    "engine",
    ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_thinker(weightless: ModelConfig, engine: str) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", exc_type=ImportError)
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "skip_mm_profiling": True}
    config = ThinkerConfig(engine=engine, dtype="float32", weights="random", vllm_args=json.dumps(small))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        thinker = load_thinker(weightless, config)
    try:
        answer = Answered()
        sampling = ThinkerSampling(max_tokens=5, min_tokens=5, ignore_eos=True)
        messages = ({"role": "user", "content": "Tell me about the sea."},)
        thinker.submit(ThinkerRequest("r", messages=messages, sampling=sampling), answer)
        answer.done()
        assert answer.error is None
        ids = np.concatenate([event.token_ids for event in answer.events])
        assert ids.size == 5 and answer.events[-1].finish_reason == "length"
    finally:
        thinker.close()


def test_other_words_are_refused() -> None:
    for make, error in (
        (lambda: TalkerConfig(weights="none"), ConfigError),
        (lambda: Code2WavConfig(weights="none"), InvalidRequestError),
        (lambda: ThinkerConfig(weights="none"), InvalidRequestError),
    ):
        with pytest.raises(error, match="checkpoint, random") as caught:
            make()
        assert caught.value.field is not None and caught.value.field.endswith("weights")
