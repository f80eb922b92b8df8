"""The device of the engine on transformers fails for good: everybody hears of it, and whoever runs the engine."""

from __future__ import annotations

import threading
from unittest import mock

from tests.thinker.support import ask, request, send
from triton_omni.errors import StageError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker import transformers_engine
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.transformers_engine import TransformersThinker

WAIT_S = 240


def test_a_lost_device_ends_all_requests_and_then_the_engine(model_config: ModelConfig) -> None:
    dead = threading.Event()
    config = ThinkerConfig(dtype="float32", device="cpu", max_num_seqs=2)
    engine = TransformersThinker(model_config, config, dead.set)
    with (
        mock.patch.object(transformers_engine, "is_lost", return_value=True),
        mock.patch.object(engine._model, "prefill", side_effect=RuntimeError("CUDA error")),
    ):
        sinks = [send(engine, request("hello")) for _ in range(3)]
        assert dead.wait(WAIT_S)
    assert all(isinstance(sink.error, StageError) for sink in sinks)
    assert isinstance(ask(engine, request("hello")).error, StageError)
    engine.close()


def test_an_engine_that_is_closed_has_not_died(model_config: ModelConfig) -> None:
    dead = threading.Event()
    TransformersThinker(model_config, ThinkerConfig(device="cpu"), dead.set).close()
    assert not dead.is_set()
