"""The reference itself: its answers have the promised shapes, and its mutations are felt and undone."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.oracle import Oracle

HELLO = [{"role": "system", "content": "be nice"}, {"role": "user", "content": "hello there"}]


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(0, 0.1, int(16_000 * seconds)), 16_000, format="WAV")
    return file.getvalue()


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def test_text_prompt_with_speech(oracle: Oracle) -> None:
    answer = oracle.answer(HELLO, max_text_tokens=6, max_frames=8)
    groups = oracle.config.talker_config.num_code_groups
    assert len(answer.token_ids) <= 6 and oracle.config.im_end_token_id not in answer.token_ids
    assert answer.codes is not None and answer.codes.shape == (8, groups) and answer.speech_finish_reason == "length"
    assert answer.wave is not None and len(answer.wave) == 8 * oracle.model.code2wav.total_upsample - 555
    assert answer.positions.shape == (3, len(answer.prompt_token_ids)) and answer.rows.shape[0] == 0


def test_text_alone_has_no_codes(oracle: Oracle) -> None:
    spoken, silent = (oracle.answer(HELLO, speech=s, max_text_tokens=6, max_frames=8) for s in (True, False))
    assert silent.codes is None and silent.wave is None
    np.testing.assert_array_equal(silent.token_ids, spoken.token_ids)


def test_audio_and_image_in_one_prompt(oracle: Oracle) -> None:
    content = [{"type": "audio", "media": 1}, {"type": "image", "media": 0}, {"type": "text", "text": "what?"}]
    answer = oracle.answer(
        [{"role": "user", "content": content}], [png(64, 96), wav(1.0)], max_text_tokens=3, max_frames=3
    )
    thinker = oracle.config.thinker_config
    audio, image = (answer.prompt_token_ids == i for i in (thinker.audio_token_id, thinker.image_token_id))
    assert audio.sum() == 13 and image.sum() == 6
    assert answer.rows.shape == (19, thinker.text_config.hidden_size)
    assert len(np.unique(answer.positions[1:, image])) < image.sum()  # rows and columns share positions


def test_nothing_to_say_is_no_error(oracle: Oracle) -> None:
    answer = oracle.answer([{"role": "system", "content": "hello"}], max_text_tokens=3, max_frames=3)
    assert answer.codes is not None and answer.codes.shape == (0, oracle.config.talker_config.num_code_groups)
    assert answer.wave is not None and answer.wave.shape == (0,) and answer.speech_finish_reason == "stop"


@pytest.mark.parametrize("name", ["first token replaced", "text one step late"])
def test_a_mutation_is_felt_and_undone(oracle: Oracle, name: str) -> None:
    right = oracle.answer(HELLO, max_text_tokens=6, max_frames=8)
    with oracle.mutated(name):
        wrong = oracle.answer(HELLO, max_text_tokens=6, max_frames=8)
    assert right.codes is not None and not np.array_equal(wrong.codes, right.codes)
    oracle._cache.clear()
    np.testing.assert_array_equal(oracle.answer(HELLO, max_text_tokens=6, max_frames=8).codes, right.codes)
