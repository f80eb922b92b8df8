from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.code2wav.streams import reference_model, reference_wave
from triton_omni.code2wav.factory import load_model
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.runner import Runner
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.model_config import ModelConfig

SLOTS = 6


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The demo network is too small to share: on a busy machine its threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.load(checkpoint)


@pytest.fixture(scope="session")
def shape(config: ModelConfig) -> Code2WavShape:
    return Code2WavShape.from_config(config.code2wav)


@pytest.fixture(scope="session")
def model(config: ModelConfig, shape: Code2WavShape) -> Callable[[torch.dtype], StreamingCode2Wav]:
    return functools.cache(lambda dtype: load_model(config, shape, SLOTS, torch.device("cpu"), dtype))


@pytest.fixture(scope="session")
def runner(model: Callable[[torch.dtype], StreamingCode2Wav]) -> Callable[[torch.dtype], Runner]:
    return functools.cache(lambda dtype: Runner(model(dtype), max_step_frames=64))


@pytest.fixture(scope="session")
def reference(config: ModelConfig) -> Callable[[torch.dtype, np.ndarray], np.ndarray]:
    """The reference's wave of (dtype, codes); computed once for equal codes."""
    models = functools.cache(lambda dtype: reference_model(config, dtype))
    waves: dict[tuple[torch.dtype, bytes], np.ndarray] = {}

    def wave(dtype: torch.dtype, codes: np.ndarray) -> np.ndarray:
        key = (dtype, codes.tobytes())
        if key not in waves:
            waves[key] = reference_wave(models(dtype), codes)
        return waves[key]

    return wave
