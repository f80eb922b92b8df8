from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.pipeline.support import ENDLESS, LIMIT_S, Caller, Hold, House, is_terminal
from triton_omni.errors import CapacityError, RequestCancelledError, RequestTimeoutError
from triton_omni.pipeline.events import CancelToken
from triton_omni.pipeline.null import NullTalkerConfig, NullThinkerConfig
from triton_omni.pipeline.pipeline import PipelineConfig

Make = Callable[..., House]
SLOW_THINKER = NullThinkerConfig(token_ms=5, prefill_ms=1, answer_tokens=10**6)
SLOW_TALKER = NullTalkerConfig(frame_ms=20, max_sessions=1)


def text_is_over(caller: Caller) -> bool:
    return "w39 " in caller.text and caller.audio.size > 0


PHASES = {
    "waiting for prefill": (NullThinkerConfig(prefill_ms=600_000), None, lambda c: bool(c.events)),
    "first text": (SLOW_THINKER, NullTalkerConfig(frame_ms=600_000), lambda c: bool(c.text)),
    "text and speech": (SLOW_THINKER, None, lambda c: c.audio.size > 0),
    "only speech is left": (None, NullTalkerConfig(frame_ms=20), text_is_over),
    "the talker starves": (NullThinkerConfig(token_ms=600_000, prefill_ms=1), None, lambda c: bool(c.text)),
}


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_frees_all_stages_at_once(house: Make, phase: str) -> None:
    thinker, talker, reached = PHASES[phase]
    omni = house(thinker, talker)
    token = CancelToken()
    caller = omni.submit(token, media=(b"image",), **ENDLESS).wait_for(reached)
    token.cancel("the client left")
    assert isinstance(caller.events[-1], RequestCancelledError)
    omni.wait_empty()
    assert sum(is_terminal(e) for e in caller.events) == 1
    assert len(omni.talker.named("end")) == len(omni.talker.named("start"))


def test_cancel_takes_less_than_250_ms(house: Make) -> None:
    """One of fifty does: the machine may be busy with other things."""
    omni = house(None, NullTalkerConfig(frame_ms=20))

    def took_s() -> float:
        token = CancelToken()
        omni.submit(token, **ENDLESS).wait_for(lambda c: c.audio.size > 0)
        began_s = time.monotonic()
        token.cancel()
        omni.wait_empty()
        return time.monotonic() - began_s

    assert any(took_s() < 0.25 for _ in range(50))


def test_cancel_while_waiting_for_a_slot_and_for_admission(house: Make) -> None:
    omni = house(None, SLOW_TALKER, PipelineConfig(max_requests=2))
    tokens = [CancelToken() for _ in range(3)]
    speaking = omni.submit(tokens[0], **ENDLESS).wait_for(lambda c: c.audio.size > 0)
    no_slot = omni.submit(tokens[1]).wait_for(lambda c: "w39 " in c.text)
    not_admitted = omni.submit(tokens[2])
    omni.wait_until(lambda: omni.engines[1].stats()["waiting"] == 1)
    assert omni.pipeline.stats()["waiting"] == 1
    assert not not_admitted.events
    for token in tokens[::-1]:
        token.cancel()
    for caller in (speaking, no_slot, not_admitted):
        assert isinstance(caller.wait().error, RequestCancelledError)
    omni.wait_empty()
    assert len(omni.thinker.named("generate")) == 2


def test_cancel_while_a_stage_call_is_under_way(house: Make) -> None:
    """START is on its way: END must follow it, never overtake it; the terminal event does not wait."""
    omni = house()
    omni.talker.before = hold = Hold("start")
    token = CancelToken()
    caller = omni.submit(token)
    assert hold.entered.wait(LIMIT_S)
    token.cancel()
    assert isinstance(caller.wait().error, RequestCancelledError)
    hold.go_on.set()
    omni.wait_empty()
    first, *appends, last = (call[0] for call in omni.talker.calls)
    assert (first, last) == ("start", "end") and set(appends) <= {"append"}


def test_cancel_that_is_faster_than_the_request(house: Make) -> None:
    """The cancel reaches the thinker before the request does, and must not be lost."""
    omni = house(NullThinkerConfig(prefill_ms=600_000))
    omni.thinker.before = hold = Hold("generate")
    token = CancelToken()
    caller = omni.submit(token)
    assert hold.entered.wait(LIMIT_S)
    token.cancel()
    caller.wait()
    hold.go_on.set()
    omni.wait_empty()


def test_cancel_before_the_submission(house: Make) -> None:
    omni = house()
    token = CancelToken()
    token.cancel("gone already")
    assert "gone already" in omni.submit(token).wait().error.message
    omni.wait_empty()
    assert not omni.thinker.named("generate")


def test_cancel_after_the_end_changes_nothing(house: Make) -> None:
    omni = house()
    token = CancelToken()
    caller = omni.submit(token).wait()
    token.cancel()
    assert len([e for e in caller.events if is_terminal(e)]) == 1
    assert omni.pipeline.stats()["cancelled"] == 0


def test_200_cancels_leak_nothing(house: Make) -> None:
    before = threading.active_count()
    config = PipelineConfig(max_requests=10)
    omni = house(NullThinkerConfig(token_ms=1, prefill_ms=1), NullTalkerConfig(frame_ms=1, max_sessions=4), config)
    for round_ in range(20):
        tokens = [CancelToken() for _ in range(10)]
        callers = [omni.submit(token, media=(b"image",) if i % 2 else ()) for i, token in enumerate(tokens)]
        callers[0].wait_for(lambda c, n=1 + round_: c.is_over or len(c.events) >= min(n, 12))
        for token in tokens:
            token.cancel()
        for caller in callers:
            assert sum(is_terminal(e) for e in caller.wait().events) == 1
        omni.wait_empty()
    engines = 2  # have a thread
    assert threading.active_count() - before <= 2 * 10 + config.append_threads + config.cancel_threads + 1 + engines
    assert len(omni.talker.named("end")) == len(omni.talker.named("start"))
    assert omni.submit().wait().info["finish_reason"] == "stop"


@pytest.mark.parametrize("phase", ["waiting for prefill", "text and speech", "the talker starves"])
def test_deadline(house: Make, phase: str) -> None:
    thinker, talker, _ = PHASES[phase]
    omni = house(thinker, talker, PipelineConfig(request_timeout_s=0.1))
    began_s = time.monotonic()
    error = omni.submit(**ENDLESS).wait().error
    assert isinstance(error, RequestTimeoutError)
    assert "request_timeout_s" in error.message
    assert time.monotonic() - began_s >= 0.1
    omni.wait_empty()


def test_deadline_of_a_request_that_was_never_admitted(house: Make) -> None:
    omni = house(NullThinkerConfig(prefill_ms=600_000), None, PipelineConfig(max_requests=1, request_timeout_s=0.1))
    callers = [omni.submit(), omni.submit()]
    for caller in callers:
        assert isinstance(caller.wait().error, RequestTimeoutError)
    omni.wait_empty()


def test_too_many_are_refused_and_the_rest_is_served(house: Make) -> None:
    omni = house(pipeline=PipelineConfig(max_requests=1, max_waiting=2))
    omni.thinker.before = hold = Hold("generate")
    callers = [omni.submit() for _ in range(4)]
    assert isinstance(callers[3].wait().error, CapacityError)
    hold.go_on.set()
    for caller in callers[:3]:
        assert caller.wait().info["finish_reason"] == "stop"
    omni.wait_empty()
    assert omni.pipeline.stats() == {"running": 0, "waiting": 0, "finished": 3, "failed": 1, "cancelled": 0}


def test_close_ends_everything_and_its_threads(house: Make) -> None:
    before = set(threading.enumerate())
    omni = house(SLOW_THINKER, SLOW_TALKER, PipelineConfig(max_requests=2))
    speaking = omni.submit(**ENDLESS).wait_for(lambda c: c.audio.size > 0)  # before another has its slot
    callers = [speaking, *(omni.submit(**ENDLESS) for _ in range(3))]
    omni.close()
    for caller in callers:
        assert isinstance(caller.error, CapacityError)
    assert omni.is_empty()
    assert isinstance(omni.submit().wait().error, CapacityError)
    assert set(threading.enumerate()) <= before


def test_a_stage_that_hangs_does_not_keep_the_caller_or_close(house: Make) -> None:
    omni = house()
    omni.code2wav.before = hang = Hold("decode")
    token = CancelToken()
    caller = omni.submit(token)
    assert hang.entered.wait(LIMIT_S)
    token.cancel()
    assert isinstance(caller.wait().error, RequestCancelledError)
    omni.wait_until(lambda: not any(engine.stats()["running"] for engine in omni.engines[:2]), LIMIT_S)
    began_s = time.monotonic()
    omni.pipeline.close(timeout_s=0.2)
    assert time.monotonic() - began_s < LIMIT_S  # which the stage takes twice
    hang.go_on.set()


def test_a_vocoder_that_hangs_keeps_no_other_cancel_waiting(house: Make) -> None:
    """More requests are taken back from it than there are threads for it; the next cancel reaches its thinker."""
    omni = house(None, NullTalkerConfig(frame_ms=1), PipelineConfig(cancel_threads=2))
    omni.code2wav.before = hang = Hold("decode")
    tokens = [CancelToken() for _ in range(4)]
    speaking = [omni.submit(token, **ENDLESS) for token in tokens]
    omni.wait_until(lambda: len(omni.code2wav.calls) == len(tokens))
    for token in tokens:
        token.cancel()
    for caller in speaking:
        assert isinstance(caller.wait().error, RequestCancelledError)
    token = CancelToken()
    omni.submit(token, modalities=["text"], **ENDLESS).wait_for(lambda c: bool(c.text))
    token.cancel()
    omni.wait_until(lambda: not any(engine.stats()["running"] for engine in omni.engines[:2]))
    assert omni.pipeline.stats()["running"] == len(tokens)  # whose places in the vocoder are not back
    hang.go_on.set()
    omni.wait_empty()
    chunks = [call[1] for call in omni.code2wav.calls]
    assert [sum(chunk.start for chunk in chunks), sum(chunk.end for chunk in chunks)] == [len(tokens)] * 2


def test_the_next_request_finds_the_cancelled_ones_place_in_the_vocoder(house: Make) -> None:
    """Under the same id of its client's, at once, while the chunk of the first is still being decoded."""
    omni = house(None, NullTalkerConfig(frame_ms=1), PipelineConfig(max_requests=1))
    omni.code2wav.before = hold = Hold("decode")
    token = CancelToken()
    omni.submit(token, request_id="mine", **ENDLESS)
    assert hold.entered.wait(LIMIT_S)
    token.cancel()
    again = omni.submit(request_id="mine", thinker={"max_tokens": 5})
    opened: list[int] = []

    def note(call: str) -> None:
        opened.append(omni.engines[2].stats()["running"] if omni.code2wav.calls[-1][1].start else 0)

    hold.go_on.set()
    omni.code2wav.before = note
    assert again.wait().info["usage"]["audio_frames"] == round(5 * 3.72)
    omni.wait_empty()
    assert opened
    assert not any(opened)
