"""Greedy speech is transformers' speech: all codes of every frame; and the comparison would notice what it should."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle import Oracle
from tests.talker.conftest import EngineMaker, speak, start_of
from tests.talker.test_prefill import CASES, MEDIA

pytestmark = pytest.mark.parity
TEXT_TOKENS, FRAMES = 6, 16  # the last text token and tts_eos are spoken well before the end


@pytest.mark.parametrize("case", CASES)
def test_codes_equal_transformers(case: str, oracle: Oracle, make_engine: EngineMaker) -> None:
    answer = oracle.answer(CASES[case], MEDIA, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES)
    codes, reason = speak(make_engine(), start_of(answer, max_frames=FRAMES))
    np.testing.assert_array_equal(codes, answer.codes)
    assert reason == answer.speech_finish_reason and len(codes) > 0


def test_every_voice_speaks_as_in_transformers(oracle: Oracle, make_engine: EngineMaker) -> None:
    engine, spoken = make_engine(), set()
    for speaker in oracle.config.talker_config.speaker_id:
        answer = oracle.answer(
            CASES["text"], speaker=speaker, max_text_tokens=TEXT_TOKENS, max_frames=8, repetition_penalty=1.3
        )
        start = start_of(answer, speaker, max_frames=8, repetition_penalty=1.3)
        codes, _ = speak(engine, start)
        np.testing.assert_array_equal(codes, answer.codes)
        spoken.add(codes.tobytes())
    assert len(spoken) == len(oracle.config.talker_config.speaker_id)


def test_speech_ends_as_in_transformers(oracle: Oracle, make_engine: EngineMaker) -> None:
    answer = oracle.answer(CASES["text"], max_text_tokens=TEXT_TOKENS, max_frames=100)
    codes, reason = speak(make_engine(), start_of(answer, max_frames=100))
    np.testing.assert_array_equal(codes, answer.codes)
    assert reason == answer.speech_finish_reason


@pytest.mark.parametrize(
    ("mutation", "case"),
    [
        ("last text token dropped", "text"),
        ("no tts_eos", "text"),
        ("first token replaced", "text"),
        ("text one step late", "text"),
        ("media rows zeroed", "audio"),
        ("media rows zeroed", "image"),
        ("rows of another layer", "audio"),
        ("rows of another layer", "image"),
        ("linear positions", "image"),
        ("predictor rope 1e4", "text"),
    ],
)
def test_a_mutation_of_the_reference_is_noticed(mutation: str, case: str, oracle: Oracle) -> None:
    right = oracle.answer(CASES[case], MEDIA, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES)
    with oracle.mutated(mutation):
        wrong = oracle.answer(CASES[case], MEDIA, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES)
    assert not np.array_equal(right.codes, wrong.codes)
