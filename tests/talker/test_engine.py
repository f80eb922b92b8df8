"""How sessions live: text in pieces, chunks, slots, ends of every kind. The network is scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.talker.conftest import CHUNKS, GREEDY, TIMEOUT_S, Listener, speak
from tests.talker.scripted import BLOCK_TEXT, EOS_TEXT, FAIL_TEXT, ScriptedRunner
from triton_omni.errors import InvalidRequestError, OmniError, StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline import chunk_policy
from triton_omni.pipeline.stages import TalkerStart
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.shape import TalkerShape

Start = Callable[..., TalkerStart]
ENOUGH = dataclasses.replace(GREEDY, max_frames=200)


@pytest.fixture
def runner(model_config: ModelConfig) -> ScriptedRunner:
    return ScriptedRunner(TalkerShape.read(model_config))


@pytest.fixture
def make(runner: ScriptedRunner) -> Iterator[Callable[..., LocalTalkerEngine]]:
    engines = []

    def make(**options: int) -> LocalTalkerEngine:
        config = TalkerConfig(**{"max_sessions": 2, "max_context": 256, **options})
        engines.append(LocalTalkerEngine(runner, config))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    runner.released.set()
    for engine in engines:
        engine.close()


Make = Callable[..., LocalTalkerEngine]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def heard(codes: np.ndarray) -> list[int]:
    return codes[:, 0].tolist()


def idle(slots: int = 2) -> dict[str, int]:
    return {"running": 0, "waiting": 0, "waiting_for_text": 0, "slots_free": slots}


def test_text_then_tts_eos_once_then_pad(make: Make, hello: Start, runner: ScriptedRunner) -> None:
    text = runner.shape.text
    codes, reason = speak(make(), hello([5, 6, 7], sampling=dataclasses.replace(GREEDY, max_frames=6)))
    assert heard(codes) == [5, 6, 7, text.tts_eos, text.tts_pad, text.tts_pad] and reason == "length"


def test_text_in_pieces_is_the_same_text(make: Make, hello: Start) -> None:
    whole, _ = speak(make(), hello([5, 6, 7, 8, EOS_TEXT]))
    engine, listener = make(), Listener()
    engine.start("s", hello([], text_finished=False), listener)
    for piece in ([], [5], [6, 7], [], [8, EOS_TEXT]):
        engine.append("s", ids(*piece), False)
    engine.append("s", ids(), True)
    codes, reason = listener.result()
    assert np.array_equal(codes, whole) and heard(codes) == [5, 6, 7, 8] and reason == "stop"


def test_adaptive_chunks_hold_the_same_codes_in_other_pieces(
    make: Make, hello: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lead at all: every chunk is as small as it may be."""
    monkeypatch.setattr(chunk_policy, "RESERVE_S", float("inf"))
    answer = [*range(33, 53), EOS_TEXT]
    whole, _ = speak(make(), hello(answer, sampling=ENOUGH, chunk_frames=(4, 25)))
    listener = Listener()
    make().start("s", hello(answer, sampling=ENOUGH, chunk_frames=(4, 25), chunk_policy="adaptive"), listener)
    codes, reason = listener.result()
    assert np.array_equal(codes, whole) and reason == "stop"
    assert [len(e.codes) for e in listener.events] == [4, 4, 4, 4, 4, 0]


@pytest.mark.parametrize(
    ("frames", "sizes"), [(1, [1]), (4, [4, 0]), (5, [4, 1]), (12, [4, 8, 0]), (80, [4, 8, 16, 25, 25, 2])]
)
def test_codes_leave_at_the_borders_of_the_chunk_plan(make: Make, hello: Start, frames: int, sizes: list[int]) -> None:
    listener = Listener()
    make().start("s", hello([*range(33, 33 + frames), EOS_TEXT], sampling=ENOUGH), listener)
    codes, reason = listener.result()
    assert [len(e.codes) for e in listener.events] == sizes and reason == "stop"
    assert heard(codes) == list(range(33, 33 + frames))
    assert all(e.codes.dtype == np.int32 and e.codes.shape[1] == codes.shape[1] for e in listener.events)


@pytest.mark.parametrize("limit", [1, 4, 5, 12])
def test_max_frames_are_exact_and_leave_with_the_reason(make: Make, hello: Start, limit: int) -> None:
    listener = Listener()
    make().start("s", hello([33] * 50, sampling=dataclasses.replace(GREEDY, max_frames=limit)), listener)
    codes, reason = listener.result()
    assert len(codes) == limit and reason == "length" and len(listener.events[-1].codes) > 0


def test_the_context_ends_speech_with_length(make: Make, hello: Start, prompt: Callable[..., np.ndarray]) -> None:
    start = hello([33] * 300, sampling=ENOUGH)
    rows = len(prompt(("user", [12, 13, 14]))) - 3 + 8
    codes, reason = speak(make(max_context=rows + 25), start)
    assert (len(codes), reason) == (25, "length")
    with pytest.raises(InvalidRequestError, match=f"{rows} talker rows and at least 25 frames.*{rows + 24}") as caught:
        speak(make(max_context=rows + 24), start)
    assert caught.value.field == "prompt_token_ids"


def test_nothing_to_say_is_a_stop_without_audio(
    make: Make, hello: Start, runner: ScriptedRunner, prompt: Callable[..., np.ndarray]
) -> None:
    engine = make()
    for start in (
        hello([]),
        hello([EOS_TEXT]),
        hello([5], prompt_token_ids=prompt(("system", [11]))),
        hello([5], prompt_token_ids=prompt(("assistant", [11])), text_finished=False),
    ):
        codes, reason = speak(engine, start)
        assert codes.shape == (0, runner.shape.groups) and reason == "stop"
    listener = Listener()
    engine.start("s", hello([], text_finished=False), listener)
    engine.append("s", ids(), True)
    assert len(listener.result()[0]) == 0
    assert engine.stats() == idle()


def test_a_session_without_text_holds_up_nobody(make: Make, hello: Start, eventually: Callable[..., None]) -> None:
    engine, late, silent = make(), Listener(), [Listener() for _ in range(3)]
    for i, listener in enumerate(silent):
        engine.start(f"silent {i}", hello([], text_finished=False), listener)
    engine.start("late", hello([5, 6], text_finished=False, chunk_frames=(2,)), late)
    assert heard(late.next().codes) == [5, 6]
    for _ in range(3):
        codes, _ = speak(engine, hello([7, 8, EOS_TEXT]))
        assert heard(codes) == [7, 8]
    expected = {"running": 2, "waiting": 0, "waiting_for_text": 4, "slots_free": 0}
    eventually(lambda: engine.stats() != expected)
    engine.append("late", ids(9, EOS_TEXT), True)
    assert heard(late.result()[0]) == [5, 6, 9]
    for i, listener in enumerate(silent):
        engine.append(f"silent {i}", ids(5, EOS_TEXT), True)
        assert heard(listener.result()[0]) == [5]
    assert engine.stats() == idle()


def test_more_sessions_than_slots_wait_in_order(make: Make, hello: Start, runner: ScriptedRunner) -> None:
    engine, listeners = make(max_sessions=1), [Listener() for _ in range(4)]
    engine.start("0", hello([BLOCK_TEXT, 5, EOS_TEXT]), listeners[0])
    assert runner.reached.wait(TIMEOUT_S)
    for i in (1, 2, 3):
        engine.start(str(i), hello([33 + i, EOS_TEXT]), listeners[i])
    assert engine.stats() == {"running": 1, "waiting": 3, "waiting_for_text": 0, "slots_free": 0}
    engine.cancel("2")
    runner.released.set()
    assert [heard(listeners[i].result()[0]) for i in (0, 1, 3)] == [[BLOCK_TEXT, 5], [34], [36]]
    codes, reason = listeners[2].result()
    assert len(codes) == 0 and reason == "cancelled" and engine.stats() == idle(1)


def test_cancel_while_speaking_frees_the_slot(make: Make, hello: Start) -> None:
    engine, listener = make(), Listener()
    engine.start("s", hello([5] * 4, text_finished=False), listener)
    assert len(listener.next().codes) == 4
    engine.cancel("s")
    assert listener.result()[1] == "cancelled" and engine.stats() == idle()
    engine.cancel("s")
    engine.append("s", ids(5), True)  # too late, and no error
    assert listener.is_silent


def test_200_cancels_leave_nothing_behind(make: Make, hello: Start) -> None:
    engine, listeners = make(), [Listener() for _ in range(200)]
    for i, listener in enumerate(listeners):
        engine.start(str(i), hello([5] * (i % 7), text_finished=False), listener)
        if i % 3:
            engine.cancel(str(i))
    for i in range(0, 200, 3):
        engine.cancel(str(i))
    assert {listener.result()[1] for listener in listeners} == {"cancelled"}
    assert engine.stats() == idle()


def test_a_failing_step_ends_its_batch_and_no_more(make: Make, hello: Start) -> None:
    engine, bystander = make(), Listener()
    engine.start("bystander", hello([5, 6], text_finished=False, chunk_frames=(2,)), bystander)
    bystander.next()  # it has no more text, so it is in no batch
    for text in ([FAIL_TEXT], [5, FAIL_TEXT]):
        with pytest.raises(StageError, match="out of luck") as caught:
            speak(engine, hello(text))
        assert caught.value.field == "talker"
    engine.append("bystander", ids(EOS_TEXT), True)
    assert heard(bystander.result()[0]) == [5, 6] and engine.stats() == idle()


def test_a_failing_sink_costs_its_own_session_only(make: Make, hello: Start) -> None:
    engine = make()

    def sink(event: object) -> None:
        raise RuntimeError("nobody listens")

    engine.start("deaf", hello([5] * 60, text_finished=False), sink)
    assert heard(speak(engine, hello([7, EOS_TEXT]))[0]) == [7]
    other = Listener()
    engine.start("other", hello([7, EOS_TEXT]), other)
    other.result()
    while engine.stats() != idle():
        speak(engine, hello([7, EOS_TEXT]))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("speaker", {"speaker": "nobody"}),
        ("chunk_frames", {"chunk_frames": ()}),
        ("chunk_frames", {"chunk_frames": (4, 0)}),
        ("token_ids", {"token_ids": ids(-1)}),
        ("token_ids", {"token_ids": ids(10**6)}),
        ("prompt_token_ids", {"prompt_token_ids": ids(1, 2, 3)}),
    ],
)
def test_bad_starts_tell_the_sink(make: Make, hello: Start, field: str, change: dict[str, object]) -> None:
    engine = make()
    with pytest.raises(InvalidRequestError) as caught:
        speak(engine, hello(**change))
    assert caught.value.field == field and engine.stats() == idle()


@pytest.mark.parametrize(
    ("text", "finished", "more", "message"),
    [([], False, -1, "must lie in"), ([], False, 10**6, "must lie in"), ([BLOCK_TEXT], True, 6, "must not follow")],
)
def test_bad_appends_end_the_session(
    make: Make, hello: Start, runner: ScriptedRunner, text: list[int], finished: bool, more: int, message: str
) -> None:
    engine, listener = make(), Listener()
    engine.start("s", hello(text, text_finished=finished), listener)
    engine.append("s", ids(more), True)
    runner.released.set()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        listener.result()
    assert caught.value.field == "token_ids" and engine.stats() == idle()


def test_an_id_is_open_once(make: Make, hello: Start) -> None:
    engine, first, second = make(), Listener(), Listener()
    engine.start("s", hello([5], text_finished=False), first)
    engine.start("s", hello([6]), second)
    with pytest.raises(InvalidRequestError, match="already open"):
        second.result()
    engine.append("s", ids(EOS_TEXT), True)
    assert heard(first.result()[0]) == [5]


def test_close_ends_every_session(make: Make, hello: Start) -> None:
    engine, listeners = make(), [Listener() for _ in range(4)]
    for i, listener in enumerate(listeners):
        engine.start(str(i), hello([5], text_finished=False), listener)
    engine.close()
    late = Listener()
    engine.start("late", hello([5]), late)
    for listener in (*listeners, late):
        with pytest.raises(OmniError, match="closed"):
            listener.result()
    assert engine.stats() == idle()
    engine.close()


def test_sessions_speak_in_one_batch(make: Make, hello: Start, runner: ScriptedRunner) -> None:
    engine, listeners = make(), [Listener(), Listener()]
    engine.start("0", hello([BLOCK_TEXT, *[5] * 20, EOS_TEXT], sampling=ENOUGH), listeners[0])
    assert runner.reached.wait(TIMEOUT_S)
    engine.start("1", hello([*[6] * 20, EOS_TEXT], sampling=ENOUGH, chunk_frames=CHUNKS), listeners[1])
    runner.released.set()
    for listener in listeners:
        listener.result()
    assert sum(len(step) == 2 for step in runner.steps) >= 19


def test_a_broken_loop_closes_the_engine(make: Make, hello: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, listener = make(), Listener()
    engine.start("s", hello([5], text_finished=False), listener)

    def broken(sessions: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "_admit", broken)
    engine.append("s", ids(6), True)
    with pytest.raises(StageError, match="closed"):
        listener.result()
    assert engine.stats() == idle()


ONE_STEP_LATE = {"async_output": True, "max_sessions": 3}


def test_a_step_is_launched_before_the_last_one_is_read(make: Make, hello: Start, runner: ScriptedRunner) -> None:
    """With async_output a session that ended in one step still has a row in the next; nobody hears of it."""
    engine = make(**ONE_STEP_LATE)
    codes, reason = speak(engine, hello([5, 6, EOS_TEXT]))
    assert heard(codes) == [5, 6] and reason == "stop"
    assert len(runner.steps) == 4  # text, text, EOS, and the one in flight
    make(async_output=False)
    runner.steps.clear()
    assert heard(speak(make(async_output=False), hello([5, 6, EOS_TEXT]))[0]) == [5, 6]
    assert len(runner.steps) == 3


def test_max_frames_and_the_context_are_never_exceeded_one_step_late(
    make: Make, hello: Start, runner: ScriptedRunner, prompt: Callable[..., np.ndarray]
) -> None:
    engine = make(**ONE_STEP_LATE)
    for limit in (1, 2, 5):
        runner.steps.clear()
        codes, reason = speak(engine, hello([33] * 50, sampling=dataclasses.replace(GREEDY, max_frames=limit)))
        assert (len(codes), reason, len(runner.steps)) == (limit, "length", limit)
    rows = len(prompt(("user", [12, 13, 14]))) - 3 + 8
    runner.steps.clear()
    codes, reason = speak(make(max_context=rows + 30, **ONE_STEP_LATE), hello([33] * 300, sampling=ENOUGH))
    assert (len(codes), reason, len(runner.steps)) == (30, "length", 30)


def test_sessions_one_step_late_say_what_they_say_at_once(make: Make, hello: Start) -> None:
    """Cancels, ends and slots reused by the next session while a step with the last one's row is in flight."""
    random = np.random.default_rng(0)
    texts = [[*random.integers(40, 200, random.integers(0, 9)).tolist(), EOS_TEXT] for _ in range(40)]
    for engine in (make(async_output=False), make(**ONE_STEP_LATE)):
        listeners = [Listener() for _ in texts]
        for i, (text, listener) in enumerate(zip(texts, listeners, strict=True)):
            engine.start(str(i), hello(text, sampling=ENOUGH), listener)
            ghost = Listener()
            engine.start(f"ghost {i}", hello([201] * 9, text_finished=False), ghost)
            engine.cancel(f"ghost {i}")
            assert ghost.result()[1] == "cancelled"
        assert [heard(listener.result()[0]) for listener in listeners] == [text[:-1] for text in texts]
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_prompts_are_computed_together_and_in_pieces(
    make: Make, hello: Start, runner: ScriptedRunner, prompt: Callable[..., np.ndarray]
) -> None:
    """16 rows a turn for all arriving sessions together; whoever speaks takes a step after every turn."""
    engine = make(max_sessions=4, prefill_chunk=16)
    speaking, listeners = Listener(), [Listener() for _ in range(3)]
    engine.start("0", hello([BLOCK_TEXT, *[5] * 30, EOS_TEXT], sampling=ENOUGH), speaking)
    assert runner.reached.wait(TIMEOUT_S)
    runner.pieces.clear()
    rows = len(prompt(("user", [12] * 9))) - 3 + 8
    for i, listener in enumerate(listeners):
        engine.start(str(i + 1), hello([40 + i, EOS_TEXT], prompt_token_ids=prompt(("user", [12] * 9))), listener)
    runner.released.set()
    assert [heard(listener.result()[0]) for listener in listeners] == [[40], [41], [42]]
    assert len(speaking.result()[0]) == 31
    computed = {}
    for pieces in runner.pieces:
        assert sum(last - first for _, first, last in pieces) <= 16
        for slot, first, last in pieces:
            assert first == computed.get(slot, 0)
            computed[slot] = last
    assert list(computed.values()) == [rows] * 3
    assert len(runner.pieces) == -(-3 * rows // 16)
    assert any(len(pieces) == 2 for pieces in runner.pieces)


def test_a_failing_prefill_ends_its_sessions_and_no_more(
    make: Make, hello: Start, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, speaking = make(), Listener()
    engine.start("speaking", hello([5, 6], text_finished=False, chunk_frames=(2,)), speaking)
    speaking.next()

    def broken(pieces: object) -> None:
        raise RuntimeError("out of rows")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "prefill", broken)
        with pytest.raises(StageError, match="out of rows"):
            speak(engine, hello([7, EOS_TEXT]))
    engine.append("speaking", ids(EOS_TEXT), True)
    assert heard(speaking.result()[0]) == [5, 6] and engine.stats() == idle()
