"""The talker's device fails for good: everybody hears of it, and whoever runs the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.talker.conftest import Listener
from tests.talker.scripted import FAIL_TEXT, ScriptedRunner
from triton_omni.errors import StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import TalkerStart
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.shape import TalkerShape

WAIT_S = 60


def test_a_lost_device_ends_all_sessions_and_then_the_engine(
    model_config: ModelConfig, hello: Callable[..., TalkerStart]
) -> None:
    listeners, dead = [Listener(), Listener()], threading.Event()
    heard_before_death: list[bool] = []

    def on_death() -> None:
        heard_before_death.extend(not listener.is_silent for listener in listeners)
        dead.set()

    runner = ScriptedRunner(TalkerShape.read(model_config))
    config = TalkerConfig(max_sessions=2, max_context=256)
    engine = LocalTalkerEngine(runner, config, is_lost=lambda: True, on_death=on_death)  # type: ignore[arg-type]
    engine.start("waits", hello([], text_finished=False), listeners[0])
    engine.start("breaks it", hello([FAIL_TEXT]), listeners[1])
    assert dead.wait(WAIT_S)
    assert heard_before_death == [True, True]
    for listener in listeners:
        with pytest.raises(StageError):
            listener.result()
    late = Listener()
    engine.start("late", hello([5]), late)
    with pytest.raises(StageError, match="closed"):
        late.result()
    engine.close()


def test_an_engine_that_is_closed_has_not_died(model_config: ModelConfig) -> None:
    runner = ScriptedRunner(TalkerShape.read(model_config))
    engine = LocalTalkerEngine(runner, TalkerConfig(), on_death=lambda: pytest.fail("it died"))  # type: ignore[arg-type]
    engine.close()
