"""The talker gets a text prompt before the thinker's first text; the prompts it must not get so, it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.pipeline.support import LIMIT_S, House, is_terminal
from triton_omni.errors import RequestCancelledError, StageError
from triton_omni.pipeline.events import CancelToken
from triton_omni.pipeline.null import NullTalkerConfig, NullThinkerConfig
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.pipeline.stages import CodesEvent, TalkerStart, ThinkerEvent, ThinkerRequest

Make = Callable[..., House]
TOOL = {"type": "function", "function": {"name": "now"}}
PROMPT = ThinkerEvent(prompt_token_ids=np.arange(32, dtype=np.int32))
WORD = ThinkerEvent(token_ids=np.array([1000], np.int32), text="w0 ")
LAST = ThinkerEvent(token_ids=np.array([1001], np.int32), text="w1 ", finish_reason="stop")


class HeldThinker:
    """Gives the prompt, then waits until it may go on to what it is told to give or raise."""

    def __init__(self, *then: ThinkerEvent | Exception) -> None:
        self._then = then
        self.go_on, self.cancelled = threading.Event(), threading.Event()

    def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]:
        yield PROMPT
        assert self.go_on.wait(LIMIT_S)
        for what in self._then:
            if isinstance(what, Exception):
                raise what
            yield what

    def cancel(self, request_id: str) -> None:
        self.cancelled.set()
        self.go_on.set()


def test_the_session_opens_with_the_prompt_and_hears_the_answer_later(house: Make) -> None:
    thinker = HeldThinker(WORD, LAST)
    omni = house(thinker_stage=thinker)
    caller = omni.submit()
    omni.wait_until(lambda: omni.engines[1].stats()["waiting_for_text"] == 1)
    [(_, _, start)] = omni.talker.named("start")
    assert np.array_equal(start.prompt_token_ids, PROMPT.prompt_token_ids)
    assert not start.token_ids.size
    assert not start.text_finished
    assert caller.text == ""
    thinker.go_on.set()
    assert caller.wait().info["usage"]["audio_frames"] == round(2 * 3.72)
    appended = [ids for _, _, ids, _ in omni.talker.named("append")]
    assert np.concatenate(appended).tolist() == [1000, 1001]
    assert [finished for *_, finished in omni.talker.named("append")][-1]
    assert len(omni.talker.named("end")) == 1
    omni.wait_empty()


@pytest.mark.parametrize(
    ("pipeline", "request_"),
    [
        ({"early_prefill": False}, {}),
        ({}, {"async_chunk": False}),
        ({}, {"tools": [TOOL]}),
        ({}, {"media": (b"image",)}),
    ],
)
def test_otherwise_it_opens_with_the_first_text(house: Make, pipeline: Any, request_: Any) -> None:
    omni = house(NullThinkerConfig(answer_tokens=1), pipeline=PipelineConfig(**pipeline))
    assert omni.submit(**request_).wait().audio.size
    [(_, _, start)] = omni.talker.named("start")
    assert start.token_ids.tolist() == [1000]


def test_an_empty_answer_is_silent_and_leaves_no_session(house: Make) -> None:
    omni = house(NullThinkerConfig(answer_tokens=0))
    caller = omni.submit().wait()
    assert caller.info["finish_reason"] == "stop"
    assert caller.info["usage"]["completion_tokens"] == 0
    assert caller.audio.size == 0
    assert len(omni.talker.named("start")) == len(omni.talker.named("end")) == 1
    assert not omni.code2wav.calls
    omni.wait_empty()


def test_a_thinker_that_fails_takes_the_session_with_it(house: Make) -> None:
    thinker = HeldThinker(StageError("thinker", "out of luck"))
    omni = house(thinker_stage=thinker)
    caller = omni.submit()
    omni.wait_until(lambda: omni.engines[1].stats()["running"] == 1)
    thinker.go_on.set()
    assert caller.wait().error.message == "out of luck"
    omni.wait_empty()
    assert omni.talker.named("end")[0][-1] is True  # cancelled


def test_a_cancel_before_the_first_text_takes_the_session_back(house: Make) -> None:
    thinker, token = HeldThinker(ThinkerEvent(finish_reason="cancelled")), CancelToken()
    omni = house(thinker_stage=thinker)
    caller = omni.submit(token)
    omni.wait_until(lambda: omni.engines[1].stats()["running"] == 1)
    token.cancel()
    assert isinstance(caller.wait().error, RequestCancelledError)
    omni.wait_empty()
    assert thinker.cancelled.is_set()
    assert omni.talker.named("end")[0][-1] is True


def test_a_talker_that_dies_before_the_first_text_ends_the_request_once(house: Make) -> None:
    class DyingTalker:
        def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]:
            assert not start.token_ids.size
            raise StageError("talker", "the process that served this request died")
            yield

        def end(self, session_id: str, *, cancel: bool) -> None: ...

    thinker = HeldThinker(ThinkerEvent(finish_reason="cancelled"))
    omni = house(thinker_stage=thinker, talker_stage=DyingTalker())
    caller = omni.submit().wait()
    assert (caller.error.field, caller.text) == ("talker", "")
    omni.wait_empty()
    assert thinker.cancelled.is_set()
    assert [call[2] for call in omni.talker.named("end")] == [True]
    assert sum(is_terminal(event) for event in caller.events) == 1


def test_requests_whose_text_is_late_keep_no_slot_from_others(house: Make) -> None:
    class PickyThinker(HeldThinker):
        def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]:
            if request.sampling.seed == 1:
                yield from super().generate(request)
            else:
                yield from (PROMPT, WORD, LAST)

    thinker = PickyThinker(WORD, LAST)
    omni = house(talker=NullTalkerConfig(frame_ms=0.2, max_sessions=2), thinker_stage=thinker)
    late = [omni.submit(thinker={"seed": 1}) for _ in range(4)]
    omni.wait_until(lambda: omni.engines[1].stats()["waiting_for_text"] == 4)
    for caller in [omni.submit() for _ in range(4)]:
        assert caller.wait().info["usage"]["audio_frames"] == round(2 * 3.72)
    assert not any(caller.is_over for caller in late)
    thinker.go_on.set()
    for caller in late:
        assert caller.wait().info["usage"]["audio_frames"] == round(2 * 3.72)
    omni.wait_empty()


def test_more_requests_than_the_talker_has_room_for(house: Make) -> None:
    omni = house(talker=NullTalkerConfig(frame_ms=0.2, max_sessions=2))
    callers = [omni.submit() for _ in range(12)]
    for caller in callers:
        assert caller.wait().info["usage"]["audio_frames"] == 149
    omni.wait_empty()
