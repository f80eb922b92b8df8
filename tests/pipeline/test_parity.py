"""The whole pipeline in one process gives transformers' text and transformers' waveform, alone and in company."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle import Oracle
from tests.test_oracle import png, wav
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.local import LocalOmni
from triton_omni.model_config import ModelConfig
from triton_omni.talker.config import TalkerConfig
from triton_omni.thinker.config import ThinkerConfig

pytestmark = pytest.mark.parity
TEXT_TOKENS, FRAMES = 12, 40


@dataclasses.dataclass(frozen=True)
class Case:
    messages: list[dict[str, Any]]
    media: tuple[bytes, ...] = ()
    speaker: str = "ethan"


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def media(kind: str, index: int) -> dict[str, Any]:
    return {"type": kind, "media": index}


CASES = {
    "text": Case([{"role": "user", "content": "Tell me about the sea."}]),
    "turns": Case(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello, who are you?"},
            {"role": "user", "content": "A friend. And you?"},
        ]
    ),
    "audio": Case([user(media("audio", 0), "What do you hear?")], (wav(1.0),)),
    "image": Case([user("Look: ", media("image", 0))], (png(64, 96),)),
    "image and audio": Case([user(media("image", 0), media("audio", 1), "What?")], (png(64, 64), wav(0.7))),
}


@dataclasses.dataclass(frozen=True)
class Spoken:
    text: str
    pcm: np.ndarray
    info: dict[str, Any]


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[LocalOmni]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # three engines at once on matrices this small only get in each other's way
    local = LocalOmni(
        ModelConfig.load(checkpoint),
        thinker=ThinkerConfig(engine="transformers", dtype="float32", device="cpu"),
        talker=TalkerConfig(dtype="float32", device="cpu", max_sessions=8, max_context=1024),
        code2wav=Code2WavConfig(device="cpu", max_sessions=8),
    )
    with local:
        yield local
    torch.set_num_threads(threads)


def speak(omni: LocalOmni, case: Case, **request: Any) -> Spoken:
    values = {
        "messages": case.messages,
        "modalities": ["text", "audio"],
        "speaker": case.speaker,
        "thinker": {"temperature": 0, "repetition_penalty": 1, "max_tokens": TEXT_TOKENS},
        "talker": {"temperature": 0, "repetition_penalty": 1.05, "max_frames": FRAMES},
        **request,
    }
    events = list(omni.generate(values, case.media))
    pcm = np.concatenate([np.empty(0, np.int16), *(event.audio for event in events)])
    return Spoken("".join(event.text for event in events), pcm, dict(events[-1].info))


def assert_same_sound(pcm: np.ndarray, expected: np.ndarray) -> None:
    """Within 4 steps of int16 everywhere, within 1 for 99.9 % of the samples."""
    assert pcm.shape == expected.shape
    steps = np.abs(pcm.astype(int) - expected)
    assert steps.max() <= 4
    assert (steps <= 1).mean() >= 0.999


def int16(wave: np.ndarray) -> np.ndarray:
    return np.clip(np.round(wave.astype(np.float64) * 32767), -32768, 32767).astype(np.int16)


@pytest.mark.parametrize("name", CASES)
def test_text_and_waveform_equal_transformers(name: str, omni: LocalOmni, oracle: Oracle) -> None:
    case = CASES[name]
    expected = oracle.answer(
        case.messages, case.media, speaker=case.speaker, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES
    )
    spoken = speak(omni, case)
    assert expected.wave is not None
    assert spoken.info["usage"]["prompt_tokens"] == expected.prompt_token_ids.size
    assert spoken.info["usage"]["text_tokens"] == expected.token_ids.size
    assert spoken.info["usage"]["audio_frames"] == len(expected.codes) > 0
    cut = "length" in (expected.finish_reason, expected.speech_finish_reason)
    assert spoken.info["finish_reason"] == ("length" if cut else "stop")
    assert_same_sound(spoken.pcm, int16(expected.wave))
    assert np.sqrt(np.mean((spoken.pcm / 32767.0) ** 2)) > 0.01  # silence would be equal too


def test_a_changed_answer_would_be_noticed(omni: LocalOmni, oracle: Oracle) -> None:
    case = CASES["text"]
    with oracle.mutated("last text token dropped"):
        wrong = oracle.answer(case.messages, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES)
    assert wrong.wave is not None
    with pytest.raises(AssertionError):
        assert_same_sound(speak(omni, case).pcm, int16(wrong.wave))


def test_hand_off_changes_nothing(omni: LocalOmni) -> None:
    plain = speak(omni, CASES["image"])
    for options in ({"async_chunk": False}, {"chunk_frames": [1]}, {"chunk_frames": [3, 17]}):
        other = speak(omni, CASES["image"], **options)
        assert other.text == plain.text
        assert_same_sound(other.pcm, plain.pcm)


@pytest.mark.parametrize("backwards", [False, True])
def test_eight_at_once_equal_each_alone(
    omni: LocalOmni, checkpoint: Path, eventually: Callable[..., None], backwards: bool
) -> None:
    voices = itertools.cycle(ModelConfig.load(checkpoint).speakers)
    cases = [dataclasses.replace(case, speaker=next(voices)) for case in [*CASES.values(), *CASES.values()][:8]]
    alone = [speak(omni, case) for case in cases]
    order = list(reversed(range(8))) if backwards else list(range(8))
    with ThreadPoolExecutor(8) as pool:
        together = dict(zip(order, pool.map(lambda i: speak(omni, cases[i]), order), strict=True))
    for index, one in enumerate(alone):
        other = together[index]
        assert other.text == one.text
        assert other.info["usage"] == one.info["usage"]
        assert_same_sound(other.pcm, one.pcm)
    eventually(lambda: {stage: n for stage, one in omni.stats().items() if (n := one["running"])})
