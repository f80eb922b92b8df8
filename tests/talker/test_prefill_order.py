"""How many chunks of prompts come before a step, several while every player has enough and one otherwise, and which
prompts are computed before their text is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.talker.conftest import TIMEOUT_S, EngineMaker, Listener
from tests.talker.scripted import BLOCK_TEXT, EOS_TEXT, ScriptedRunner
from triton_omni.errors import StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import TalkerStart
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.prefill import plan_prefill
from triton_omni.talker.runner import Piece
from triton_omni.talker.shape import TalkerShape

Start = Callable[..., TalkerStart]


@pytest.fixture
def runner(make_engine: EngineMaker, model_config: ModelConfig) -> Iterator[ScriptedRunner]:
    runner = ScriptedRunner(TalkerShape.read(model_config))
    yield runner
    runner.released.set()  # before make_engine closes its engines


@pytest.fixture
def rows(runner: ScriptedRunner, hello: Start) -> int:
    """Of each prompt here."""
    prefill = plan_prefill(hello(), runner.shape)
    assert prefill is not None
    return prefill.rows


def burst(engine: LocalTalkerEngine, runner: ScriptedRunner, hello: Start, speaking: TalkerStart) -> list[Listener]:
    """Six sessions that arrive together, while a step of ``speaking`` runs. They say 40, 41, …"""
    engine.start("speaking", speaking, Listener())
    assert runner.reached.wait(TIMEOUT_S)
    runner.calls = ""
    runner.pieces.clear()
    listeners = [Listener() for _ in range(6)]
    for i, listener in enumerate(listeners):
        engine.start(str(i), hello([40 + i, EOS_TEXT]), listener)
    runner.released.set()
    return listeners


def heard(listeners: Sequence[Listener]) -> list[list[int]]:
    return [listener.result()[0][:, 0].tolist() for listener in listeners]


ALL = [[40 + i] for i in range(6)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("most", "calls"), [(1, "PSPSPSPSPSPS"), (2, "PPSPPSPPS"), (4, "PPPPSPPS"), (9, "PPPPPPS")])
def test_so_many_chunks_come_before_a_step(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start, rows: int, most: int, calls: str, ahead: bool
) -> None:
    engine = make_engine(runner, prefill_chunk=rows, prefill_chunks_per_step=most, async_output=ahead)
    listeners = burst(engine, runner, hello, hello([BLOCK_TEXT, *[5] * 40]))
    assert heard(listeners) == ALL
    assert runner.calls.startswith(calls)
    assert [pieces[0][1:] for pieces in runner.pieces] == [(0, rows)] * 6


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("chunk_frames", "tick_s", "calls"),
    [((2, 30), 0.0, "PPPPS"), ((1, 30), 0.0, "PSPSPSPSPSPS"), ((2, 30), 1.0, "PSPSPSPSPSPS")],
    ids=["enough", "small reserve", "slow frames"],
)
def test_a_voice_whose_player_may_run_dry_waits_for_one_chunk(
    make_engine: EngineMaker,
    runner: ScriptedRunner,
    hello: Start,
    rows: int,
    chunk_frames: tuple[int, ...],
    tick_s: float,
    calls: str,
    ahead: bool,
) -> None:
    clock: Callable[[], float] = itertools.count(0.0, tick_s).__next__
    engine = make_engine(runner, clock, prefill_chunk=rows, async_output=ahead)
    speaking = hello([5, 6, BLOCK_TEXT, *[5] * 40], chunk_frames=chunk_frames)
    assert heard(burst(engine, runner, hello, speaking)) == ALL
    assert runner.calls.startswith(calls)


def test_a_voice_without_text_keeps_no_prompts_waiting(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start, rows: int
) -> None:
    engine, late = make_engine(runner, itertools.count(0.0).__next__, prefill_chunk=rows), Listener()
    engine.start("late", hello([5, 6], text_finished=False, chunk_frames=(2,)), late)
    late.next()
    assert heard(burst(engine, runner, hello, hello([BLOCK_TEXT, *[5] * 40]))) == ALL
    assert runner.calls.startswith("PPPPS")


def test_prompts_go_on_where_the_last_chunk_ended(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start, rows: int
) -> None:
    """Chunks of one turn share a prompt, and so do those of two turns; all in order of arrival."""
    engine = make_engine(runner, prefill_chunk=5, prefill_chunks_per_step=3)
    assert heard(burst(engine, runner, hello, hello([BLOCK_TEXT, *[5] * 40]))) == ALL
    slots, computed = [], dict.fromkeys(range(8), 0)
    for slot, first, last in itertools.chain.from_iterable(runner.pieces):
        assert first == computed[slot]
        computed[slot] = last
        slots.append(slot)
    assert [slot for slot, _ in itertools.groupby(slots)] == [1, 2, 3, 4, 5, 6]
    assert list(computed.values()) == [0, *[rows] * 6, 0]
    assert runner.calls.startswith("PPPSPPPS")


def test_a_failing_chunk_takes_only_its_sessions_out_of_the_next_one(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session has rows in the chunk that fails and in the one behind it."""
    prefill, fails = runner.prefill, iter([True])

    def fail_once(pieces: Sequence[Piece]) -> Any:
        if next(fails, False):
            raise RuntimeError("out of rows")
        prefill(pieces)

    engine = make_engine(runner, prefill_chunk=rows + rows // 2)
    engine.start("speaking", hello([BLOCK_TEXT, *[5] * 40]), Listener())
    assert runner.reached.wait(TIMEOUT_S)
    runner.pieces.clear()
    monkeypatch.setattr(runner, "prefill", fail_once)
    listeners = [Listener() for _ in range(3)]
    for i, listener in enumerate(listeners):
        engine.start(str(i), hello([40 + i, EOS_TEXT]), listener)
    runner.released.set()
    for listener in listeners[:2]:
        with pytest.raises(StageError, match="out of rows"):
            listener.result()
    assert heard(listeners[2:]) == [[42]]
    assert runner.pieces == [[(3, 0, rows)]]


def text(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def idle(slots: int) -> dict[str, int]:
    return {"running": 0, "waiting": 0, "waiting_for_text": 0, "slots_free": slots}


def test_a_prompt_is_computed_before_its_text_is_there(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start, eventually: Callable[..., None]
) -> None:
    engine, listener, silent = make_engine(runner, max_sessions=2), Listener(), Listener()
    engine.start("early", hello([], text_finished=False), listener)
    eventually(lambda: runner.calls != "P")
    assert engine.stats() == {"running": 1, "waiting": 0, "waiting_for_text": 1, "slots_free": 1}
    engine.start("silent", hello([], text_finished=False), silent)
    eventually(lambda: runner.calls != "PP")
    engine.append("early", text(5, EOS_TEXT), True)
    assert heard([listener]) == [[5]] and runner.calls == "PPSS"
    engine.append("silent", text(), True)
    codes, reason = silent.result()
    assert len(codes) == 0 and reason == "stop" and runner.calls == "PPSS"
    assert engine.stats() == idle(2)


def test_text_takes_a_slot_from_the_youngest_session_without_text(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start, eventually: Callable[..., None]
) -> None:
    engine = make_engine(runner, max_sessions=2)
    early, late = [Listener(), Listener()], [Listener(), Listener()]
    for i in (0, 1):
        engine.start(f"early {i}", hello([], text_finished=False), early[i])
        eventually(lambda i=i: len(runner.pieces) <= i)  # type: ignore[misc]
    _, (second,) = runner.pieces
    engine.start("late 0", hello([BLOCK_TEXT, EOS_TEXT]), late[0])
    assert runner.reached.wait(TIMEOUT_S)
    assert runner.pieces[2:] == [[second]] and runner.steps == [[second[0]]]
    engine.start("late 1", hello([7, EOS_TEXT]), late[1])
    engine.append("early 0", text(8, EOS_TEXT), True)  # whose prompt is computed
    runner.released.set()
    assert heard([late[0], early[0], late[1]]) == [[BLOCK_TEXT], [8], [7]]
    eventually(lambda: len(runner.pieces) < 5)  # only early 1 has to be computed twice
    engine.append("early 1", text(9, EOS_TEXT), True)
    assert heard([early[1]]) == [[9]]
    assert len(runner.pieces) == 5 and engine.stats() == idle(2)


def test_no_session_with_text_gives_its_slot_away(
    make_engine: EngineMaker, runner: ScriptedRunner, hello: Start
) -> None:
    engine, begun, late = make_engine(runner, max_sessions=1), Listener(), Listener()
    engine.start("begun", hello([5], text_finished=False, chunk_frames=(1,)), begun)
    assert begun.next().codes[:, 0].tolist() == [5]
    engine.start("late", hello([6, EOS_TEXT]), late)
    engine.append("begun", text(7), False)
    assert begun.next().codes[:, 0].tolist() == [7] and late.is_silent
    engine.append("begun", text(EOS_TEXT), True)
    assert heard([begun, late]) == [[5, 7], [6]]
    assert len(runner.pieces) == 2
