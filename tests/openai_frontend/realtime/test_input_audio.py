"""The input buffer and its turns, and what the frontend loads for them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from openai_frontend.realtime.formats import WireFormat
from openai_frontend.realtime.input_audio import InputAudio, SpeechStarted, SpeechStopped
from openai_frontend.realtime.vad import TurnRules
from tests.openai_frontend.realtime.talk import question
from triton_omni.errors import InvalidRequestError

RULES = TurnRules(threshold=0.5, padding_ms=300, silence_ms=500)
PCM = WireFormat("audio/pcm", 24_000)


def heard(data: bytes, piece_bytes: int, rules: TurnRules = RULES, wire: WireFormat = PCM) -> list:
    buffer = InputAudio(16_000 * 60)
    buffer.configure(wire, rules)
    return [event for at in range(0, len(data), piece_bytes) for event in buffer.append(data[at : at + piece_bytes])]


def test_turns_do_not_depend_on_how_the_audio_comes():
    data = np.concatenate([question(), question()]).tobytes()
    turns = heard(data, len(data))
    assert [type(event) for event in turns] == 2 * [SpeechStarted, SpeechStopped]
    for cut in heard(data, 1_237), heard(data, 9_600):
        assert [(getattr(e, "start_ms", 0), getattr(e, "end_ms", 0)) for e in cut] == [
            (getattr(e, "start_ms", 0), getattr(e, "end_ms", 0)) for e in turns
        ]
        assert np.abs(cut[1].samples.astype(int) - turns[1].samples).max() <= 4  # soxr dithers


def test_padding_and_silence_are_the_turns():
    data = question().tobytes()
    started, stopped = heard(data, 4_800)
    early, late = heard(data, 4_800, TurnRules(0.5, padding_ms=100, silence_ms=800))
    assert early.start_ms - started.start_ms == 200
    assert 250 < late.end_ms - stopped.end_ms < 350
    assert len(stopped.samples) == (stopped.end_ms - started.start_ms) * 16


@pytest.mark.parametrize("kind", ["silence", "noise", "tone"])
def test_no_speech_no_turn(kind):
    noise = np.random.default_rng(1).normal(0, 1_000, 72_000)
    sounds = {"silence": np.zeros(72_000), "noise": noise, "tone": 9_000 * np.sin(np.arange(72_000) / 8)}
    assert heard(sounds[kind].astype(np.int16).tobytes(), 4_800) == []


def test_speech_over_the_telephone():
    wire = WireFormat("audio/pcmu", 8_000)
    data = wire.encode(question()[::3])
    assert [type(event) for event in heard(data, 160, wire=wire)] == [SpeechStarted, SpeechStopped]


def test_between_turns_only_the_padding_is_kept():
    buffer = InputAudio(16_000 * 2)
    buffer.configure(PCM, RULES)
    for _ in range(20):
        assert buffer.append(bytes(48_000)) == []
    assert len(buffer.take()) < 16_000


def test_without_turns_all_of_it_is_kept_up_to_a_bound():
    buffer = InputAudio(16_000 * 2)
    buffer.configure(PCM, None)
    buffer.append(bytes(48_001))
    buffer.append(bytes(23_999))
    assert len(buffer.take()) == 24_000
    assert len(buffer.take()) == 0
    with pytest.raises(InvalidRequestError, match="2 s"):
        buffer.append(bytes(48_000 * 2 + 2_000))


def test_hearing_loads_no_torch():
    code = """
import sys
import numpy as np
import openai_frontend.main
from openai_frontend.realtime.vad import SpeechProbability
assert 0 <= SpeechProbability().of(np.zeros(512, np.int16)) < 0.5
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
