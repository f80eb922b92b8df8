"""The rows and positions that the talker reads are the ones transformers computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.oracle import DecodedVideo, Oracle
from tests.talker.conftest import start_of
from tests.test_oracle import HELLO, png, wav
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import PromptRows, TalkerStart
from triton_omni.talker.prefill import plan_prefill, prefill_rows
from triton_omni.talker.runner import TalkerRunner

IMAGE, AUDIO, VIDEO = ({"type": kind, "media": i} for i, kind in enumerate(("image", "audio", "video")))
MEDIA = [
    png(64, 96),
    wav(1.0),
    DecodedVideo(np.random.default_rng(2).integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)),
]
CASES: dict[str, list[dict[str, Any]]] = {
    "text": HELLO,
    "turns": [*HELLO, {"role": "assistant", "content": "sure"}, {"role": "user", "content": "go on"}],
    "audio": [{"role": "user", "content": [AUDIO, {"type": "text", "text": "what?"}]}],
    "image": [{"role": "user", "content": [{"type": "text", "text": "look: "}, IMAGE]}],
    "image and audio": [{"role": "user", "content": [IMAGE, AUDIO, {"type": "text", "text": "what?"}]}],
    "image, then audio": [
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b c d"},
        {"role": "user", "content": [AUDIO, {"type": "text", "text": "e"}]},
    ],
    "video": [{"role": "user", "content": [VIDEO, {"type": "text", "text": "what?"}]}],
}


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_rows_and_positions_equal_transformers(
    case: str, oracle: Oracle, make_runner: Callable[..., TalkerRunner]
) -> None:
    talker, seen = oracle.model.talker, {}
    generate = talker.generate

    def watch(**kwargs: Any) -> Any:
        seen["rows"] = kwargs["inputs_embeds"][0]
        return generate(**kwargs)

    def positions(module: Any, args: Any, kwargs: Any) -> None:
        seen.setdefault("positions", kwargs["position_ids"][-3:, 0])

    handle = talker.model.register_forward_pre_hook(positions, with_kwargs=True)
    with mock.patch.object(talker, "generate", watch):
        answer = oracle.answer(CASES[case], MEDIA, max_text_tokens=3, max_frames=1)
    handle.remove()
    ours = make_runner().talker
    prefill = plan_prefill(start_of(answer), ours.shape)
    assert prefill is not None
    with torch.inference_mode():
        first_codes = torch.tensor([[ours.shape.codec.bos] + [-1] * (ours.shape.groups - 1)])
        first_step = ours.embed_codes(first_codes) + ours.text_table[int(answer.token_ids[0])]
        rows = torch.cat([prefill_rows(prefill, ours), first_step])
    torch.testing.assert_close(rows, seen["rows"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(prefill.positions, seen["positions"][:, :-1].numpy())
    assert (seen["positions"][:, -1] == prefill.next_position).all()


@pytest.fixture
def shape(make_runner: Callable[..., TalkerRunner]) -> Any:
    return make_runner(max_sessions=1).talker.shape


Hello = Callable[..., TalkerStart]


def test_without_a_user_message_there_is_nothing_to_answer(shape: Any, hello: Hello, prompt: Any) -> None:
    assert plan_prefill(hello(prompt_token_ids=prompt(("system", [11]))), shape) is None


def test_other_roles_and_earlier_answers_are_skipped(shape: Any, hello: Hello, prompt: Any) -> None:
    other = prompt(("user", [11]))
    other[1] = 12  # a role the talker does not know
    ids = np.concatenate([other[:-3], prompt(("assistant", [13]), ("user", [14]))])
    got, plain = (plan_prefill(hello(prompt_token_ids=p), shape) for p in (ids, prompt(("user", [14]))))
    assert got is not None and plain is not None
    np.testing.assert_array_equal(got.text_ids, plain.text_ids)
    np.testing.assert_array_equal(got.positions, plain.positions)


def test_text_already_in_the_assistants_mouth_is_spoken_first(shape: Any, hello: Hello, prompt: Any) -> None:
    ids = np.concatenate([prompt(("user", [14])), [21, 22]]).astype(np.int32)
    prefill = plan_prefill(hello(prompt_token_ids=ids), shape)
    assert prefill is not None and prefill.answer_ids == [21, 22]


def test_unknown_speaker_lists_the_voices(shape: Any, hello: Hello) -> None:
    with pytest.raises(InvalidRequestError, match="'nobody'") as caught:
        plan_prefill(hello(speaker="nobody"), shape)
    assert caught.value.field == "speaker" and all(voice in caught.value.message for voice in shape.speakers)
    assert plan_prefill(hello(speaker=shape.default_speaker.title()), shape) is not None


def test_bad_prompts_and_rows_name_their_field(shape: Any, hello: Hello, prompt: Any) -> None:
    start = hello()
    media = prompt(("user", [shape.text.media[0], 12]))
    rows = np.zeros(shape.thinker_hidden * 4, np.uint8)
    positions, far = np.zeros((2, 3, len(media)), np.int32)
    far[0, 1:] = 10**7
    bad: list[tuple[str, str, dict[str, Any]]] = [
        ("prompt_token_ids", "one-dimensional", {"prompt_token_ids": start.prompt_token_ids[None]}),
        ("prompt_token_ids", "must lie in", {"prompt_token_ids": start.prompt_token_ids + 10**6}),
        ("prompt_token_ids", "assistant turn", {"prompt_token_ids": start.prompt_token_ids[:-3]}),
        ("prompt_token_ids", "assistant turn", {"prompt_token_ids": np.empty(0, np.int32)}),
        ("prompt_rows", "1 media positions", {"prompt_token_ids": media}),
    ]
    for what, given in (
        ("float8", PromptRows(positions, rows, "float8")),
        ("bytes", PromptRows(positions, rows[1:], "float32")),
        ("positions", PromptRows(positions[:, 1:], rows, "float32")),
        (r"within \[0, .* got -3 to", PromptRows(positions - np.array([[0], [3], [0]], np.int32), rows, "float32")),
        (r"within \[0, .* to 1000000\d", PromptRows(positions + far, rows, "float32")),
    ):
        bad.append(("prompt_rows", what, {"prompt_token_ids": media, "prompt_rows": given}))
    for field, message, change in bad:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            plan_prefill(dataclasses.replace(start, **change), shape)
        assert caught.value.field == field
    assert plan_prefill(hello(prompt_token_ids=media, prompt_rows=PromptRows(positions, rows, "float32")), shape)
