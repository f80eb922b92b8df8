"""Pieces of text never split a character and together are what the tokenizer decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triton_omni.thinker.detokenizer import REPLACEMENT, IncrementalDetokenizer


class Decoder:
    """The tokenizer's decode; remembers how many ids it was given at most."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.most = 0

    def __call__(self, ids: list[int]) -> str:
        self.most = max(self.most, len(ids))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def pieces(tokenizer: Any, ids: list[int], decode: Decoder | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode or Decoder(tokenizer), set(tokenizer.all_special_ids))
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "👩‍👩‍👧 ok 🎈", "user and system", ""])
def test_characters_arrive_whole(tokenizer: Any, text: str) -> None:
    got = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(got) == text
    assert REPLACEMENT not in "".join(got)
    assert got[-1] == ""


def test_a_character_leaves_with_its_last_byte(tokenizer: Any) -> None:
    ids = tokenizer.encode("a🎈b", add_special_tokens=False)
    if len(ids) == 6:  # one id per byte
        assert pieces(tokenizer, ids) == ["a", "", "", "", "🎈", "b", ""]
    half = ids[:-2]
    assert "".join(pieces(tokenizer, half)) == tokenizer.decode(half)


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("🎈", add_special_tokens=False)
    mixed = [i for token in ids for i in (token, tokenizer.all_special_ids[0])]
    assert "".join(pieces(tokenizer, mixed)) == tokenizer.decode(mixed, skip_special_tokens=True) == "🎈"


def test_any_ids_add_up(tokenizer: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, len(tokenizer), rng.integers(1, 60)).tolist()
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_broken_bytes_do_not_pile_up(tokenizer: Any) -> None:
    balloon = tokenizer.encode("🎈", add_special_tokens=False)
    if len(balloon) != 4:
        pytest.skip("the tokenizer has no ids for single bytes of this character")
    for token_id in (balloon[0], balloon[-1]):  # a lead byte, a continuation byte
        decode, ids = Decoder(tokenizer), [token_id] * 200
        got = pieces(tokenizer, ids, decode)
        assert "".join(got) == tokenizer.decode(ids)
        assert decode.most < 20
        assert sum(map(bool, got)) > 190  # each leaves as soon as the next has come
