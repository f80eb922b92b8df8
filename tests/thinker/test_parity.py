"""The thinker's ids, positions and rows are those of transformers' generate."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.oracle import DecodedVideo, Oracle
from tests.thinker.support import TIMEOUT_S, Media, ask, request
from triton_omni.pipeline.stages import ThinkerEngine

pytestmark = pytest.mark.parity

AUDIO, IMAGE, VIDEO = ({"type": kind, "media": i} for i, kind in enumerate(("audio", "image", "video")))
SAY = {"type": "text", "text": "what do you make of it?"}
SYSTEM = {"role": "system", "content": "You are a careful listener."}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


CASES: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "hello there"}],
    "one word": [{"role": "user", "content": "hi"}],
    "several turns": [
        SYSTEM,
        {"role": "user", "content": "What is a codec frame?"},
        {"role": "assistant", "content": "Eighty milliseconds of speech."},
        {"role": "user", "content": "And a code group? 🎈"},
    ],
    "audio": [user(AUDIO)],
    "image": [user(IMAGE, SAY)],
    "audio and image": [user(AUDIO, SAY, IMAGE)],
    "image, then audio": [SYSTEM, user(IMAGE, AUDIO)],
    "video": [user(VIDEO, SAY)],
    "two of each": [user(IMAGE, AUDIO, AUDIO, IMAGE), {"role": "assistant", "content": ""}, user(SAY)],
    "all in two turns": [SYSTEM, user(IMAGE, SAY), {"role": "assistant", "content": "A square."}, user(VIDEO, AUDIO)],
}


def check(engine: ThinkerEngine, oracle: Oracle, media: Media, messages: Any) -> None:
    decoded = DecodedVideo(media.frames, fps=2.0, audio=media.track)
    expected = oracle.answer(messages, (media.audio, media.image, decoded), speech=False, max_text_tokens=40)
    what = request(
        None, messages=messages, media=(media.audio, media.image, media.video), max_tokens=40, want_rows=True
    )
    sink = ask(engine, what)
    rows = engine.rows(what.request_id, TIMEOUT_S)
    np.testing.assert_array_equal(sink.prompt, expected.prompt_token_ids)
    np.testing.assert_array_equal(sink.ids, expected.token_ids)
    assert sink.finish_reason == expected.finish_reason
    np.testing.assert_array_equal(rows.positions, expected.positions)
    got = rows.rows.view(np.float32).reshape(expected.rows.shape)
    np.testing.assert_allclose(got, expected.rows, atol=5e-4, rtol=1e-4)  # of values up to 8


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_generate(engine: ThinkerEngine, oracle: Oracle, media: Media, case: str) -> None:
    check(engine, oracle, media, CASES[case])


def test_audio_in_video(engine: ThinkerEngine, oracle: Oracle, media: Media) -> None:
    messages = [user(VIDEO, SAY), SYSTEM, user(AUDIO)]
    what = request(
        None,
        messages=messages,
        media=(media.audio, media.image, media.video),
        max_tokens=24,
        use_audio_in_video=True,
        want_rows=True,
    )
    sink = ask(engine, what)
    spoken, _ = soundfile.read(io.BytesIO(media.audio), dtype="float32")
    inputs = oracle.processor(
        text=[oracle.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)],
        videos=[media.frames],
        audio=[media.track, spoken],
        audio_from_video_indices=[0, None],
        load_audio_from_video=True,
        fps=2.0,
        return_tensors="pt",
    )
    thinker = oracle.model.thinker
    ids = thinker.generate(
        **inputs,
        use_audio_in_video=True,
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=oracle.config.im_end_token_id,
    )[0].tolist()
    assert sink.prompt == inputs["input_ids"][0].tolist()
    assert sink.ids == [i for i in ids[len(sink.prompt) :] if i != oracle.config.im_end_token_id]
    positions, _ = thinker.get_rope_index(
        inputs["input_ids"],
        None,
        inputs["video_grid_thw"],
        inputs["attention_mask"],
        True,
        inputs["feature_attention_mask"].sum(1),
        inputs["video_second_per_grid"],
    )
    np.testing.assert_array_equal(engine.rows(what.request_id, TIMEOUT_S).positions, positions[:, 0].numpy())
    assert (positions[0] != positions[1]).any()
