"""What is measured in lockstep is: no session is a step ahead of the others, whenever whoever measures stands still."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from triton_omni.model_config import ModelConfig
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.measure.sessions import StepClock, lockstep
from triton_omni.talker.runner import TalkerRunner

FRAMES = 6
PAUSE_S = 0.5  # in which a step would come, if one could


class Paused(LocalTalkerEngine):
    """Whoever appends stands still behind it until a step has been made. ``rows``: sessions in each step."""

    def __init__(self, *given: Any) -> None:
        self.rows: list[int] = []
        self.stepped = threading.Event()
        super().__init__(*given)

    def append(self, *given: Any) -> None:
        self.stepped.clear()
        super().append(*given)
        self.stepped.wait(PAUSE_S)

    def _decode(self, batch: Any) -> Any:
        self.rows.append(len(batch))
        frames = super()._decode(batch)
        self.stepped.set()
        return frames


def test_no_step_comes_between_the_texts(model_config: ModelConfig, make_runner: Callable[..., TalkerRunner]) -> None:
    runner = make_runner()
    engine = Paused(runner, TalkerConfig(max_sessions=8, max_context=1024))
    try:
        row = lockstep(engine, model_config, StepClock(runner), batch=2, context=48, frames=FRAMES)
    finally:
        engine.close()
    assert engine.rows[1 - FRAMES :] == [2] * (FRAMES - 1)  # of each session the first frame was made before
    assert row["frames_per_s"] > 0
