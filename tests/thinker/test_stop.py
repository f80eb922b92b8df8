"""Stop strings: found however the text is cut, never shown, and which ids count as said."""

from __future__ import annotations

import numpy as np
import pytest

from triton_omni.thinker.answer import Answer, Piece
from triton_omni.thinker.stop import StopStrings


def run(parts: list[str], stop: list[str]) -> tuple[str, bool, list[str]]:
    strings, shown = StopStrings(stop), []
    for part in parts:
        text, stopped = strings.push(part)
        shown.append(text)
        if stopped:
            return "".join(shown), True, shown
    return "".join(shown) + strings.flush(), False, shown


def test_text_that_may_begin_a_stop_string_waits() -> None:
    assert run(["a<", "s", "ot", "<s", "top", ">b"], ["<stop>"]) == ("a<sot", True, ["a", "", "<sot", "", "", ""])


def test_the_earliest_of_several_ends_it() -> None:
    assert run(["one two three"], ["three", "two"])[:2] == ("one ", True)


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["ab", "ab"], ["abc"]) == ("abab", False, ["", "ab"])


def test_any_cut_gives_the_same() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        text = "".join(rng.choice(list("ab"), rng.integers(1, 16)))
        stop = ["".join(rng.choice(list("ab"), rng.integers(1, 5))) for _ in range(rng.integers(1, 4))]
        cuts = sorted(rng.integers(0, len(text) + 1, 3))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, stopped, _ = run(parts, stop)
        assert stopped == any(s in text for s in stop)
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
        if not stopped:
            assert shown == text


WORDS = ["Hi", ".\n", " END", " E", "ND", "!", ""]


def feed(ids: list[int], stop: list[str], min_tokens: int = 0) -> tuple[list[Piece], Piece]:
    answer = Answer(lambda window: "".join(WORDS[i] for i in window), frozenset(), stop, min_tokens)
    given = []
    for token_id in ids:
        given.append(answer.push(token_id))
        if given[-1].stopped:
            return given, given[-1]
    return given, answer.finish()


def test_without_stop_strings_ids_leave_at_once() -> None:
    given, last = feed([0, 6, 5], [])
    assert given == [Piece([0], "Hi"), Piece([6], ""), Piece([5], "!")]
    assert last == Piece([], "")


def test_ids_of_the_stop_string_are_not_said() -> None:
    given, _ = feed([0, 3, 4, 5], [" END"])
    assert given == [Piece([0], "Hi"), Piece([], ""), Piece([], "", stopped=True)]


def test_ids_held_back_leave_when_it_was_no_stop_string() -> None:
    given, last = feed([0, 3, 5], [" END"])
    assert given == [Piece([0], "Hi"), Piece([], ""), Piece([3, 5], " E!")]
    assert last == Piece([], "")
    assert feed([0, 3], [" END"])[1] == Piece([3], " E")


def test_an_id_with_text_before_the_stop_string_is_said() -> None:
    assert feed([0, 1], ["\n"])[0][-1] == Piece([1], ".", stopped=True)


@pytest.mark.parametrize(
    ("min_tokens", "said"), [(0, [0]), (1, [0]), (2, [0, 2, 5]), (3, [0, 2, 5]), (4, [0, 2, 5, 2])]
)
def test_stop_strings_count_after_min_tokens(min_tokens: int, said: list[int]) -> None:
    given, last = feed([0, 2, 5, 2], [" END"], min_tokens)
    assert [i for piece in given for i in piece.token_ids] == said
    assert last.stopped == (min_tokens < 4)
