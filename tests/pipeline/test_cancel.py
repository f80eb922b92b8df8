from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.pipeline.support import LIMIT_S, Caller, House, is_terminal
from triton_omni.errors import CapacityError, RequestCancelledError, RequestTimeoutError
from triton_omni.pipeline.events import CancelToken
from triton_omni.pipeline.null import NullTalkerConfig, NullThinkerConfig
from triton_omni.pipeline.pipeline import PipelineConfig

Make = Callable[..., House]
SLOW_THINKER = NullThinkerConfig(token_ms=5, prefill_ms=1, answer_tokens=400)
SLOW_TALKER = NullTalkerConfig(frame_ms=20, max_sessions=1)


def text_is_over(caller: Caller) -> bool:
    return "w39 " in caller.text and caller.audio.size > 0


PHASES = {
    "waiting for prefill": (NullThinkerConfig(prefill_ms=60_000), None, lambda c: bool(c.events)),
    "first text": (SLOW_THINKER, NullTalkerConfig(frame_ms=60_000), lambda c: bool(c.text)),
    "text and speech": (SLOW_THINKER, None, lambda c: c.audio.size > 0),
    "only speech is left": (None, NullTalkerConfig(frame_ms=20), text_is_over),
    "the talker starves": (NullThinkerConfig(token_ms=60_000, prefill_ms=1), None, lambda c: bool(c.text)),
}


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_frees_all_stages_at_once(house: Make, phase: str) -> None:
    thinker, talker, reached = PHASES[phase]
    omni = house(thinker, talker)
    token = CancelToken()
    caller = omni.submit(token, media=(b"image",)).wait_for(reached)
    token.cancel("the client left")
    assert isinstance(caller.events[-1], RequestCancelledError)
    omni.wait_empty(LIMIT_S)
    assert sum(is_terminal(e) for e in caller.events) == 1
    assert len(omni.talker.named("end")) == len(omni.talker.named("start"))


def test_cancel_takes_less_than_250_ms(house: Make) -> None:
    omni = house(None, NullTalkerConfig(frame_ms=20))
    took_s = []
    for _ in range(5):
        token = CancelToken()
        omni.submit(token).wait_for(lambda c: c.audio.size > 0)
        began_s = time.monotonic()
        token.cancel()
        omni.wait_empty(LIMIT_S)
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < 0.25  # the best of five: the machine may be busy with other things


def test_cancel_while_waiting_for_a_slot_and_for_admission(house: Make) -> None:
    omni = house(None, SLOW_TALKER, PipelineConfig(max_requests=2))
    tokens = [CancelToken() for _ in range(3)]
    speaking = omni.submit(tokens[0]).wait_for(lambda c: c.audio.size > 0)
    no_slot = omni.submit(tokens[1]).wait_for(lambda c: "w39 " in c.text)
    not_admitted = omni.submit(tokens[2])
    assert omni.engines[1].stats()["waiting"] == 1
    assert omni.pipeline.stats()["waiting"] == 1
    assert not not_admitted.events
    for token in tokens[::-1]:
        token.cancel()
    for caller in (speaking, no_slot, not_admitted):
        assert isinstance(caller.wait(LIMIT_S).error, RequestCancelledError)
    omni.wait_empty(LIMIT_S)
    assert len(omni.thinker.named("generate")) == 2


def test_cancel_while_a_stage_call_is_under_way(house: Make) -> None:
    """START is on its way: END must follow it, never overtake it; the terminal event does not wait."""
    omni = house()
    entered, go_on = threading.Event(), threading.Event()

    def hold(call: str) -> None:
        if call == "start":
            entered.set()
            assert go_on.wait(10)

    omni.talker.before = hold
    token = CancelToken()
    caller = omni.submit(token)
    assert entered.wait(10)
    token.cancel()
    assert isinstance(caller.wait(LIMIT_S).error, RequestCancelledError)
    go_on.set()
    omni.wait_empty(LIMIT_S)
    assert [call[0] for call in omni.talker.calls] == ["start", "end"]


def test_cancel_that_is_faster_than_the_request(house: Make) -> None:
    """The cancel reaches the thinker before the request does, and must not be lost."""
    omni = house(NullThinkerConfig(prefill_ms=60_000))
    entered, go_on = threading.Event(), threading.Event()

    def hold(call: str) -> None:
        if call == "generate":
            entered.set()
            assert go_on.wait(10)

    omni.thinker.before = hold
    token = CancelToken()
    caller = omni.submit(token)
    assert entered.wait(10)
    token.cancel()
    caller.wait(LIMIT_S)
    go_on.set()
    omni.wait_empty(LIMIT_S)


def test_cancel_before_the_submission(house: Make) -> None:
    omni = house()
    token = CancelToken()
    token.cancel("gone already")
    assert "gone already" in omni.submit(token).wait(LIMIT_S).error.message
    omni.wait_empty(LIMIT_S)
    assert not omni.thinker.named("generate")


def test_cancel_after_the_end_changes_nothing(house: Make) -> None:
    omni = house()
    token = CancelToken()
    caller = omni.submit(token).wait()
    token.cancel()
    assert len([e for e in caller.events if is_terminal(e)]) == 1
    assert omni.pipeline.stats()["cancelled"] == 0


def test_200_cancels_leak_nothing(house: Make) -> None:
    omni = house(NullThinkerConfig(token_ms=1, prefill_ms=1), NullTalkerConfig(frame_ms=1, max_sessions=4))
    threads = None
    for round_ in range(20):
        tokens = [CancelToken() for _ in range(10)]
        callers = [omni.submit(token, media=(b"image",) if i % 2 else ()) for i, token in enumerate(tokens)]
        callers[0].wait_for(lambda c, n=1 + round_: c.is_over or len(c.events) >= min(n, 12))
        for token in tokens:
            token.cancel()
        for caller in callers:
            assert sum(is_terminal(e) for e in caller.wait(LIMIT_S).events) == 1
        omni.wait_empty(LIMIT_S)
        if round_ == 5:
            threads = threading.active_count()
    assert threads is not None
    assert threading.active_count() <= threads + 10
    assert len(omni.talker.named("end")) == len(omni.talker.named("start"))
    assert omni.submit().wait().info["finish_reason"] == "stop"


@pytest.mark.parametrize("phase", ["waiting for prefill", "text and speech", "the talker starves"])
def test_deadline(house: Make, phase: str) -> None:
    thinker, talker, _ = PHASES[phase]
    omni = house(thinker, talker, PipelineConfig(request_timeout_s=0.1))
    began_s = time.monotonic()
    error = omni.submit().wait(5).error
    assert isinstance(error, RequestTimeoutError)
    assert "request_timeout_s" in error.message
    assert 0.1 <= time.monotonic() - began_s < 1
    omni.wait_empty(LIMIT_S)


def test_deadline_of_a_request_that_was_never_admitted(house: Make) -> None:
    omni = house(NullThinkerConfig(prefill_ms=60_000), None, PipelineConfig(max_requests=1, request_timeout_s=0.1))
    callers = [omni.submit(), omni.submit()]
    for caller in callers:
        assert isinstance(caller.wait(LIMIT_S).error, RequestTimeoutError)
    omni.wait_empty(LIMIT_S)


def test_too_many_are_refused_and_the_rest_is_served(house: Make) -> None:
    omni = house(pipeline=PipelineConfig(max_requests=1, max_waiting=2))
    callers = [omni.submit() for _ in range(4)]
    assert isinstance(callers[3].wait(LIMIT_S).error, CapacityError)
    for caller in callers[:3]:
        assert caller.wait().info["finish_reason"] == "stop"
    assert omni.pipeline.stats() == {"running": 0, "waiting": 0, "finished": 3, "failed": 1, "cancelled": 0}


def test_close_ends_everything_and_its_threads(house: Make) -> None:
    before = set(threading.enumerate())
    omni = house(SLOW_THINKER, SLOW_TALKER, PipelineConfig(max_requests=2))
    callers = [omni.submit() for _ in range(4)]
    callers[0].wait_for(lambda c: c.audio.size > 0)
    omni.close()
    for caller in callers:
        assert isinstance(caller.error, CapacityError)
    assert omni.is_empty()
    assert isinstance(omni.submit().wait(LIMIT_S).error, CapacityError)
    assert set(threading.enumerate()) == before


def test_a_stage_that_hangs_does_not_keep_the_caller_or_close(house: Make) -> None:
    omni = house()
    entered, go_on = threading.Event(), threading.Event()

    def hang(call: str) -> None:
        entered.set()
        go_on.wait(10)

    omni.code2wav.before = hang
    token = CancelToken()
    caller = omni.submit(token)
    assert entered.wait(10)
    token.cancel()
    assert isinstance(caller.wait(LIMIT_S).error, RequestCancelledError)
    omni.wait_until(lambda: not any(engine.stats()["running"] for engine in omni.engines[:2]), LIMIT_S)
    began_s = time.monotonic()
    omni.pipeline.close(timeout_s=0.2)
    assert time.monotonic() - began_s < LIMIT_S
    go_on.set()
