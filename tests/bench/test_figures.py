"""Every figure from scripted timings; powers of two, so that sums are exact."""

from __future__ import annotations

import pytest

from triton_omni.bench.figures import figures, playback, spread, tpot_s
from triton_omni.bench.record import Record, Recorder

# Two seconds of sound in three pieces; the second comes a quarter of a second late.
AUDIO = ((0.5, 0.5), (1.25, 0.5), (1.5, 1.0))
FIRST = Record(
    sent_s=100.0,
    end_s=102.0,
    e2e_s=1.75,
    text=((0.25, 1), (0.5, 2), (1.0, 1)),
    audio=AUDIO,
    prompt_tokens=60,
    text_tokens=4,
)
SECOND = Record(
    sent_s=101.0, end_s=104.0, e2e_s=2.75, text=((0.75, 4),), audio=((1.5, 4.0),), prompt_tokens=62, text_tokens=4
)
FAILED = Record(sent_s=100.5, end_s=100.75, late_s=0.125, audio=AUDIO, error="HTTP 503: full")


class TestPlayback:
    def test_in_time(self):
        play = playback([(1.0, 1.0), (1.5, 1.0), (3.0, 0.5)])
        assert (play.stalls, play.stalled_s, play.underrun_s) == (0, 0.0, 0.0)
        assert play.gaps_s == (0.5, 1.5)

    def test_a_player_that_waits_and_one_that_does_not(self):
        """Late by 1 s, then by 1 s more: one stands still twice, the other's deficit is 2 s."""
        play = playback([(0.0, 1.0), (2.0, 1.0), (4.0, 1.0)])
        assert (play.stalls, play.stalled_s) == (2, 2.0)
        assert play.underrun_s == 2.0

    def test_after_a_stall_the_clock_of_the_waiting_player_is_behind(self):
        """The third piece is late for a clock that never stopped, but not for this one."""
        play = playback([(0.0, 1.0), (2.0, 1.0), (2.5, 4.0)])
        assert (play.stalls, play.stalled_s, play.underrun_s) == (1, 1.0, 1.0)

    def test_nothing_and_a_single_piece(self):
        assert playback([]) == playback([(3.0, 1.0)])
        assert playback([]).gaps_s == ()


def test_spread():
    assert spread("x", "_ms", [1.0, 2.0, 3.0, 4.0], 1e3) == {
        "x_ms": 2500.0,
        "x_p50_ms": 2500.0,
        "x_p95_ms": pytest.approx(3850),
        "x_p99_ms": pytest.approx(3970),
    }
    assert spread("x", "", []) == {"x": None, "x_p50": None, "x_p95": None, "x_p99": None}


def test_tpot_counts_tokens_and_not_events():
    assert tpot_s(FIRST) == (1.0 - 0.25) / 3
    assert tpot_s(SECOND) is None


def test_a_level():
    row = figures([FIRST, FAILED, SECOND])
    expected = {
        "completed": 2,
        "failed": 1,
        "wall_s": 4.0,
        "req_s": 0.5,
        "errors": {"HTTP 503: full": 1},
        "audio_s_per_s": 6.0 / 4,
        "text_tokens_per_s": 2.0,
        "chunks_per_s": (3 + 3 + 1 + 1) / 4,
        "prompt_tokens": 61.0,
        "text_tokens": 4.0,
        "text_chunks": 2.0,
        "audio_s": 3.0,
        "audio_chunks": 2.0,
        "ttft_ms": 500.0,
        "ttft_p50_ms": 500.0,
        "ttfp_ms": 1000.0,
        "e2e_ms": 2250.0,
        "tpot_ms": 250.0,
        "rtf": (1.5 / 2 + 1.5 / 4) / 2,
        "gap_ms": 500.0,
        "gap_max_ms": 750.0,
        "underruns": 1,
        "stalls": 1,
        "stalled_s": 0.25,
        "underrun_ms": 125.0,
        "audible_underruns": 1,
        "sent_late_max_ms": 125.0,
    }
    assert {key: row[key] for key in expected} == expected
    assert row["ttfp_p99_ms"] == pytest.approx(500 + 0.99 * 1000)
    assert row["ttfp_p95_ms"] == pytest.approx(500 + 0.95 * 1000)


def test_a_level_in_which_everything_failed():
    row = figures([FAILED])
    assert (row["completed"], row["failed"], row["req_s"], row["ttfp_ms"], row["rtf"]) == (0, 1, 0.0, None, None)


class TestRecorder:
    def close(self, answer: Recorder, **wants: bool) -> Record:
        return answer.close(12.0, **{"wants_text": True, "wants_audio": True} | wants)

    def test_tokens_come_from_counts_that_grow(self):
        answer = Recorder(10.0)
        for now_s, tokens_so_far in ((0.25, 1), (0.5, 1), (0.75, 4)):
            answer.text(now_s, tokens_so_far)
        answer.audio(0.5, 0.0)
        answer.audio(1.0, 0.5)
        answer.event(1.25)
        answer.usage(prompt_tokens=7, text_tokens=5)
        answer.ended = True
        record = self.close(answer)
        assert record == Record(
            10.0, 12.0, e2e_s=1.25, text=((0.25, 1), (0.75, 3)), audio=((1.0, 0.5),), prompt_tokens=7, text_tokens=5
        )

    def test_without_counts_a_piece_is_a_token(self):
        answer = Recorder(0.0)
        answer.text(0.25, None)
        answer.text(0.5, None)
        answer.ended = True
        record = self.close(answer, wants_audio=False)
        assert (record.error, record.text_tokens) == (None, 2)

    @pytest.mark.parametrize(
        ("text", "audio", "ended", "reason"),
        [
            (True, True, False, "the stream broke off before its end"),
            (True, False, True, "no audio in the answer"),
            (False, True, True, "no text in the answer"),
        ],
    )
    def test_an_answer_that_is_not_whole_has_failed(self, text, audio, ended, reason):
        answer = Recorder(0.0)
        if text:
            answer.text(1.0, 1)
        if audio:
            answer.audio(1.0, 1.0)
        answer.ended = ended
        assert self.close(answer).error == reason

    def test_the_first_reason_stays(self):
        answer = Recorder(0.0)
        answer.fail("HTTP 500: x")
        assert self.close(answer).error == "HTTP 500: x"
