"""Requests the thinker refuses, each by the name of the field, and prompts as the model's template has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.thinker.support import Media, ask, mkv, png, request, wav
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import ThinkerEngine

SILENT = wav(np.zeros(0))


def user(*parts: Any) -> list[Any]:
    return [{"role": "system", "content": "be nice"}, {"role": "user", "content": [*parts]}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("messages", "field", "told"),
    [
        ([], "messages", "at least one"),
        ([7], "messages[0]", "object"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "user"),
        ([{"content": "x"}], "messages[0].role", "None"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 7}], "messages[1].content", "list of parts"),
        (user("x"), "messages[1].content[0]", "audio, image, video"),
        (user(text("x"), {"type": "smell", "media": 0}), "messages[1].content[1]", "audio, image, video"),
        (user({"type": "text", "text": 7}), "messages[1].content[0].text", "string"),
        (user({"type": "image"}), "messages[1].content[0].media", "None"),
        (user({"type": "image", "media": 9}), "messages[1].content[0].media", "below 3"),
        (user({"type": "image", "media": -1}), "messages[1].content[0].media", "-1"),
        (user({"type": "image", "media": True}), "messages[1].content[0].media", "True"),
        (user(text("a"), {"type": "image", "media": 0}), "messages[1].content[1]", "image"),
        (user(text("a"), {"type": "audio", "media": 0}), "messages[1].content[1]", "audio"),
        (user(text("a"), {"type": "audio", "media": 1}), "messages[1].content[1]", "0 samples"),
        (user(text("a"), {"type": "video", "media": 0}), "messages[1].content[1]", "video"),
        (user({"type": "image", "media": 2}), "messages", "aspect ratio"),
        (user(text("a<|audio_pad|>b")), "messages[1].content[0].text", "<|audio_pad|>"),
        ([{"role": "user", "content": "<|vision_start|>"}], "messages[0].content", "<|vision_start|>"),
    ],
)
def test_refused(engine: ThinkerEngine, messages: Any, field: str, told: str) -> None:
    narrow = png(np.zeros((2, 900, 3), np.uint8))
    sink = ask(engine, request(None, messages=messages, media=(b"junk", SILENT, narrow)))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == field
    assert told in sink.error.message
    assert sink.events == []


def test_media_without_any_sent(engine: ThinkerEngine) -> None:
    sink = ask(engine, request([{"type": "audio", "media": 0}]))
    assert sink.error is not None and sink.error.field == "messages[0].content[0].media"


def test_audio_in_video_needs_a_track(engine: ThinkerEngine, media: Media) -> None:
    content = [{"type": "video", "media": 0}]
    sink = ask(engine, request(content, media=(mkv(media.frames, None),), use_audio_in_video=True))
    assert sink.error is not None and sink.error.field == "messages[0].content[0]"
    assert "no audio track" in sink.error.message


def test_a_prompt_longer_than_the_context(engine: ThinkerEngine, tokenizer: Any, checkpoint: Any) -> None:
    from triton_omni.model_config import ModelConfig

    context = ModelConfig.load(checkpoint).context_tokens
    one = len(tokenizer.encode("x ", add_special_tokens=False))
    sink = ask(engine, request("x " * (context // one + 1)))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == "messages"
    assert f"at most {context - 1}" in sink.error.message


def test_the_prompt_is_the_template_s(engine: ThinkerEngine, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, *user(text("a"), text("b"))]
    sink = ask(engine, request(None, messages=messages, max_tokens=1))
    plain = [m | {"content": m["content"] if isinstance(m["content"], str) else "ab"} for m in messages]
    assert sink.prompt == tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
