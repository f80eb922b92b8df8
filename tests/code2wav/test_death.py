"""code2wav's device fails for good: everybody hears of it, and whoever runs the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.code2wav.streams import random_codes
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.errors import StageError
from triton_omni.pipeline.stages import CodesChunk


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_device_closes_the_engine(runner, config, monkeypatch, lost):
    deaths = []
    broken = runner(torch.float32)
    engine = StreamingEngine(
        broken, max_sessions=2, idle_timeout_s=60, is_lost=lambda: lost, on_death=lambda: deaths.append(1)
    )
    codes = random_codes(config, 4, seed=0)
    engine.decode([CodesChunk("open", codes, start=True)])

    def fail(*_):
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(broken, "decode", fail)
        chunks = [CodesChunk("a", codes, start=True), CodesChunk("a", codes)]
        assert all(isinstance(result, Exception) for result in engine.decode(chunks))
    assert len(deaths) == lost
    assert engine.stats()["running"] == (not lost)
    [later] = engine.decode([CodesChunk("open", codes)])
    assert isinstance(later, StageError if lost else np.ndarray)
