from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.pipeline.support import ENDLESS, HELLO, LIMIT_S, Hold, House, is_terminal
from triton_omni.errors import InvalidRequestError, StageError
from triton_omni.pipeline import chunk_policy
from triton_omni.pipeline.null import NullTalkerConfig, NullThinkerConfig
from triton_omni.pipeline.stages import CodesEvent, FinishReason, Int32, TalkerStart, ThinkerEvent, ThinkerRequest

Make = Callable[..., House]


def test_text_and_speech_of_one_request(house: Make) -> None:
    omni = house()
    caller = omni.submit().wait()
    start, end = caller.deltas[0].info, caller.info
    assert start["type"] == "start"
    assert start["usage"] == {"prompt_tokens": 32}
    assert [e.info for e in caller.deltas[1:-1]] == [{}] * (len(caller.events) - 2)
    assert caller.text == "".join(f"w{i} " for i in range(40))
    assert end["type"] == "end"
    assert end["finish_reason"] == "stop"
    assert end["usage"] == {
        "prompt_tokens": 32,
        "completion_tokens": 40 + 149,
        "text_tokens": 40,
        "audio_frames": 149,
        "audio_samples": 149 * 1920 - 555,
    }
    assert caller.audio.size == 149 * 1920 - 555
    assert 0 < end["timings_ms"]["first_text"] <= end["timings_ms"]["first_audio"] <= end["timings_ms"]["total"]
    assert sum(is_terminal(e) for e in caller.events) == 1
    omni.wait_empty()


def test_text_deltas_count_their_tokens_where_asked(house: Make) -> None:
    caller = house().submit(continuous_usage=True).wait()
    counted = [event.info["usage"]["text_tokens"] for event in caller.deltas[1:-1] if event.text]
    assert counted == sorted(counted)
    assert counted[-1] == caller.info["usage"]["text_tokens"] == 40
    assert all(event.info == {} for event in caller.deltas[1:-1] if not event.text)


def test_deltas_bring_the_log_probabilities_of_their_tokens_where_asked(house: Make) -> None:
    caller = house().submit(thinker={"logprobs": 2, "max_tokens": 5}).wait()
    deltas = [event for event in caller.deltas[1:-1] if event.text]
    for event in deltas:
        assert "".join(entry["token"] for entry in event.info["logprobs"]) == event.text
        assert all(len(entry["top_logprobs"]) == 2 for entry in event.info["logprobs"])
    assert caller.text == "w0 w1 w2 w3 w4 "
    assert all(event.info == {} for event in caller.deltas[1:-1] if not event.text)


def test_what_the_thinker_finds_wrong_is_named_as_it_was_sent(house: Make) -> None:
    error = house().submit(thinker={"response_format": {"type": "json_object"}}).wait().error
    assert isinstance(error, InvalidRequestError)
    assert error.field == "thinker.response_format.type"


def test_audio_is_one_unbroken_tone_whatever_the_chunks(house: Make) -> None:
    omni = house()
    plain = omni.submit().wait().audio
    for chunk_frames in ([1], [25], [7, 3]):
        assert np.array_equal(omni.submit(chunk_frames=chunk_frames).wait().audio, plain)


@pytest.mark.parametrize(
    ("frame_s", "sizes"),
    [
        (0.0, [4, 4, 4, 4, 4, 2]),  # whatever comes, the player has run dry
        (1e6, [4, 18]),  # and here it never does
    ],
)
def test_adaptive_chunks_are_as_large_as_the_player_can_wait_for(
    house: Make, monkeypatch: pytest.MonkeyPatch, frame_s: float, sizes: list[int]
) -> None:
    monkeypatch.setattr(chunk_policy, "FRAME_S", frame_s)
    omni = house()
    omni.submit(chunk_frames=[4, 25], chunk_policy="adaptive", talker={"max_frames": 22}).wait()
    assert [call[1].codes.shape[0] for call in omni.code2wav.calls] == sizes


def test_chunks_follow_the_plan_and_the_last_carries_end(house: Make) -> None:
    omni = house()
    omni.submit().wait()
    chunks = [call[1] for call in omni.code2wav.calls]
    assert [c.codes.shape[0] for c in chunks] == [4, 8, 16, 25, 25, 25, 25, 21]
    assert [c.start for c in chunks] == [True] + [False] * 7
    assert [c.end for c in chunks] == [False] * 7 + [True]


class ThinkerThatListens:
    """Four ids, and the rest of the answer when it is told that they were heard."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]:
        yield ThinkerEvent(prompt_token_ids=np.arange(32, dtype=np.int32))
        for number in range(4):
            yield ThinkerEvent(token_ids=np.array([1000 + number], np.int32), text=f"w{number} ")
        assert self.heard.wait(LIMIT_S)
        yield ThinkerEvent(token_ids=np.array([1004], np.int32), text="w4 ", finish_reason="stop")

    def cancel(self, request_id: str) -> None:
        pass


def test_first_audio_comes_before_the_thinker_has_finished(house: Make) -> None:
    """4 frames need 4 ids."""
    thinker = ThinkerThatListens()
    omni = house(thinker_stage=thinker)
    caller = omni.submit().wait_for(lambda c: c.audio.size > 0)
    assert (caller.text, caller.audio.size) == ("w0 w1 w2 w3 ", 4 * 1920 - 555)
    thinker.heard.set()
    assert caller.wait().text == "w0 w1 w2 w3 w4 "
    assert caller.audio.size == round(5 * 3.72) * 1920 - 555


def test_text_only_never_touches_talker_or_code2wav(house: Make) -> None:
    omni = house()
    caller = omni.submit(modalities=["text"]).wait()
    assert caller.info["usage"]["text_tokens"] == 40
    assert caller.info["timings_ms"]["first_audio"] is None
    assert caller.audio.size == 0
    assert not omni.talker.calls + omni.code2wav.calls


def test_transcript_streams_with_audio_alone(house: Make) -> None:
    caller = house().submit(modalities=["audio"]).wait()
    assert caller.text.startswith("w0 w1 ")
    assert caller.audio.size


@pytest.mark.parametrize("frames_per_token", [1.0, 3.0, 5.0])
def test_one_word_answers_are_flushed(house: Make, frames_per_token: float) -> None:
    omni = house(NullThinkerConfig(answer_tokens=1), NullTalkerConfig(frame_ms=0.2, frames_per_token=frames_per_token))
    caller = omni.submit().wait()
    assert caller.audio.size == round(frames_per_token) * 1920 - 555
    start: TalkerStart = omni.talker.named("start")[0][2]
    pieces = [(start.token_ids, start.text_finished)] + [call[2:4] for call in omni.talker.named("append")]
    assert np.concatenate([ids for ids, _ in pieces]).tolist() == [1000]
    assert pieces[-1][1]


def test_empty_answer_gives_no_audio_and_stops(house: Make) -> None:
    omni = house(NullThinkerConfig(answer_tokens=0))
    caller = omni.submit(media=(b"image",)).wait()
    assert caller.info["finish_reason"] == "stop"
    assert caller.info["usage"]["completion_tokens"] == 0
    assert not omni.talker.calls + omni.code2wav.calls
    omni.wait_empty()  # its rows too


class ScriptedTalker:
    """A talker that says these chunk sizes, whatever it hears; the last one ends its speech."""

    def __init__(self, *frames: int, reason: FinishReason = "stop") -> None:
        self.events = [CodesEvent(np.zeros((n, 16), np.int32)) for n in frames[:-1]]
        self.events.append(CodesEvent(np.zeros((frames[-1], 16), np.int32), reason))

    def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]:
        return iter(self.events)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        pass

    def end(self, session_id: str, *, cancel: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("frames", "calls"),
    [
        ((0, 4, 3), [(4, True, False), (3, False, True)]),  # an acknowledgement without frames comes first
        ((4, 8, 0), [(4, True, False), (8, False, False), (0, False, True)]),  # EOS right at a border
        ((0, 2), [(2, True, True)]),
        ((0, 0), []),  # EOS as the first code
    ],
)
@pytest.mark.parametrize("async_chunk", [True, False])
def test_ends_without_frames(
    house: Make, frames: tuple[int, ...], calls: list[tuple[int, bool, bool]], async_chunk: bool
) -> None:
    omni = house(talker_stage=ScriptedTalker(*frames))
    caller = omni.submit(async_chunk=async_chunk).wait()
    got = [(len(call[1].codes), call[1].start, call[1].end) for call in omni.code2wav.calls]
    assert got == (calls if async_chunk or not calls else [(sum(frames), True, True)])
    assert caller.info["finish_reason"] == "stop"
    assert caller.audio.size == max(0, sum(frames) * 1920 - 555)


def test_a_stage_that_stops_without_a_finish_reason_is_an_error(house: Make) -> None:
    talker = ScriptedTalker(0, 4, reason="cancelled")
    caller = house(talker_stage=talker).submit().wait()
    assert isinstance(caller.error, StageError)
    assert caller.error.field == "talker"


def test_every_id_reaches_the_talker_once_and_in_order(house: Make) -> None:
    omni = house(NullThinkerConfig(answer_tokens=101))
    omni.submit().wait()
    start: TalkerStart = omni.talker.named("start")[0][2]
    pieces = [(start.token_ids, start.text_finished)] + [call[2:4] for call in omni.talker.named("append")]
    assert np.concatenate([ids for ids, _ in pieces]).tolist() == list(range(1000, 1101))
    assert [finished for _, finished in pieces] == [False] * (len(pieces) - 1) + [True]
    [end] = omni.talker.named("end")
    assert end == ("end", omni.talker.calls[0][1], False)


def test_message_budget(house: Make) -> None:
    omni = house(NullThinkerConfig(token_ms=4, prefill_ms=1))
    caller = omni.submit().wait()
    messages = omni.thinker.messages + omni.talker.messages + omni.code2wav.messages + len(caller.events)
    assert caller.info["usage"]["audio_frames"] == 149
    assert messages <= 160


def test_thinker_length_and_talker_length_are_length(house: Make) -> None:
    omni = house()
    cut_text = omni.submit(thinker={"max_tokens": 5}).wait()
    assert cut_text.info["finish_reason"] == "length"
    assert cut_text.info["usage"]["text_tokens"] == 5
    assert cut_text.info["usage"]["audio_frames"] == round(5 * 3.72)
    cut_speech = omni.submit(talker={"max_frames": 10}).wait()
    assert cut_speech.info["finish_reason"] == "length"
    assert cut_speech.info["usage"]["audio_frames"] == 10
    assert cut_speech.info["usage"]["text_tokens"] == 40  # the text goes on


def test_rows_are_fetched_for_media_with_speech_only(house: Make) -> None:
    omni = house()
    omni.submit().wait()
    omni.submit(modalities=["text"], media=(b"image",)).wait()
    assert not omni.thinker.named("rows")
    omni.submit(media=(b"image",)).wait()
    assert len(omni.thinker.named("rows")) == 1
    first, second = (call[2] for call in omni.talker.named("start"))
    assert first.prompt_rows is None
    assert second.prompt_rows.positions.shape == (3, 32)
    assert [call[1].want_rows for call in omni.thinker.named("generate")] == [False, False, True]


def test_without_async_chunk_each_stage_waits_for_the_whole(house: Make) -> None:
    omni = house()
    caller = omni.submit(async_chunk=False).wait()
    [start] = omni.talker.named("start")
    assert start[2].text_finished
    assert start[2].token_ids.size == 40
    [decode] = omni.code2wav.calls
    assert decode[1].codes.shape == (149, 16)
    assert decode[1].start
    assert decode[1].end
    assert [bool(e.audio.size) for e in caller.deltas].count(True) == 1
    assert np.array_equal(caller.audio, omni.submit().wait().audio)
    assert omni.submit(async_chunk=False, thinker={"max_tokens": 1}).wait().audio.size == 4 * 1920 - 555


def test_64_requests_at_once_and_more_waiting(house: Make) -> None:
    omni = house(NullThinkerConfig(token_ms=4, prefill_ms=2), NullTalkerConfig(frame_ms=1, max_sessions=32))
    omni.thinker.before = hold = Hold("generate")
    callers = [omni.submit(chunk_frames=[4, 8, 16, 25 + i % 7]) for i in range(80)]
    assert omni.pipeline.stats()["running"] == 64
    assert omni.pipeline.stats()["waiting"] == 16
    hold.go_on.set()
    expected = callers[0].wait().audio
    for caller in callers:
        assert np.array_equal(caller.wait().audio, expected)
        assert caller.text == callers[0].text
    omni.wait_empty()
    assert omni.pipeline.stats()["finished"] == 80


STAGE_CALLS = [
    ("thinker", "generate"),
    ("thinker", "rows"),
    ("talker", "start"),
    ("talker", "append"),
    ("code2wav", "decode"),
]


@pytest.mark.parametrize(("stage", "call"), STAGE_CALLS)
@pytest.mark.parametrize("error", [RuntimeError("broken pipe"), InvalidRequestError("messages[0]", "is no image")])
def test_a_failing_stage_ends_the_request_and_frees_the_others(
    house: Make, stage: str, call: str, error: Exception
) -> None:
    omni = house(NullThinkerConfig(token_ms=2, prefill_ms=1, answer_tokens=10**6))

    def fail(name: str) -> None:
        if name == call and (name != "decode" or len(omni.code2wav.calls) == 2):
            raise error

    getattr(omni, stage).before = fail
    caller = omni.submit(media=(b"image",), **ENDLESS).wait()
    if isinstance(error, InvalidRequestError):
        assert caller.error is error
    else:
        assert isinstance(caller.error, StageError)
        assert caller.error.field == stage
        assert "broken pipe" in caller.error.message
    assert sum(is_terminal(e) for e in caller.events) == 1
    getattr(omni, stage).before = lambda name: None
    omni.wait_empty()
    ended = omni.talker.named("end")
    assert len(ended) == len(omni.talker.named("start"))
    assert all(end[2] for end in ended)  # cancel=True
    assert omni.submit(thinker={"max_tokens": 5}).wait().info["usage"]["audio_frames"] == round(5 * 3.72)


@pytest.mark.parametrize("engine", [0, 1, 2])
def test_an_engine_that_dies_under_a_request(house: Make, engine: int) -> None:
    omni = house(NullThinkerConfig(token_ms=5, prefill_ms=1, answer_tokens=10**6))
    caller = omni.submit(**ENDLESS).wait_for(lambda c: c.audio.size > 0)
    omni.engines[engine].close()
    assert isinstance(caller.wait().error, StageError)
    omni.wait_empty()


def test_a_caller_that_fails_to_take_events_counts_as_gone(house: Make) -> None:
    omni = house()
    taken = []

    def emit(event: Any) -> None:
        taken.append(event)
        raise OSError("closed")

    omni.pipeline.submit(omni.parser.check({"messages": HELLO, "modalities": ["audio"]}), emit)
    omni.wait_empty()
    assert len(taken) == 2  # the first event, and the terminal one
    assert omni.pipeline.stats()["cancelled"] == 1


def test_stream_gives_events_and_leaving_it_cancels(house: Make) -> None:
    omni = house(NullThinkerConfig(token_ms=5, prefill_ms=1, answer_tokens=10**6))
    short = {"messages": HELLO, "modalities": ["audio"], "thinker": {"max_tokens": 20}}
    assert list(omni.pipeline.stream(omni.parser.check(short)))[-1].is_end
    for event in omni.pipeline.stream(omni.parser.check(short | ENDLESS)):
        if event.audio.size:
            break
    omni.wait_empty()
    assert omni.pipeline.stats()["cancelled"] == 1


def test_a_finished_request_leaves_nothing_in_memory(house: Make) -> None:
    omni = house()
    omni.thinker.calls = omni.talker.calls = omni.code2wav.calls = _Forgetful()
    seen = []
    for media in ((), (b"image",), ()):
        caller = omni.submit(media=media).wait()
        seen.append(weakref.ref(caller))
        del caller
    omni.submit().wait()  # every thread has had something else to do
    omni.wait_empty()
    omni.wait_until(lambda: gc.collect() >= 0 and [ref() for ref in seen] == [None] * 3)


class _Forgetful(list[Any]):
    def append(self, item: Any) -> None:
        pass
