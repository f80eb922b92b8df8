"""Answers with tool calls: which ids are spoken, whatever the tokens are, and where stop strings count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from triton_omni.thinker.answer import Answer, Piece
from triton_omni.thinker.tool_calls import ToolCallParser
from triton_omni.tools import joined

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b. c"}}\n</tool_call>'


def feed(tokens: Sequence[str], stop: Sequence[str] = (), *, parallel: bool = True) -> Piece:
    """All that leaves of the answer whose i-th token has the text ``tokens[i]``; one without text is special."""

    def decode(ids: list[int]) -> str:
        return "".join(tokens[i] for i in ids)

    special = [i for i, text in enumerate(tokens) if not text]
    answer = Answer(decode, special, stop, 0, ToolCallParser(parallel=parallel, new_id=lambda: "id"))
    given = Piece([], "")
    for token_id in range(len(tokens)):
        given += answer.push(token_id, {"token": tokens[token_id]})
        if given.stopped:
            return given
    return given + answer.finish()


def arguments(piece: Piece) -> list[str]:
    return [delta["function"]["arguments"] for delta in joined(piece.tool_calls)]


def test_ids_of_calls_are_not_spoken() -> None:
    tokens = ["Let", " me", " see.", "\n", "<tool_call>", "\n", '{"name": "f"', ', "arguments": {"a":', " 1}}", "\n",
              "</tool_call>", "\n"]  # fmt: skip
    given = feed(tokens)
    assert given.token_ids == [0, 1, 2]
    assert given.call_token_ids == [*range(3, 12)]
    assert given.text == "Let me see."
    assert arguments(given) == ['{"a": 1}']
    assert [entry["token"] for entry in given.logprobs] == tokens


def test_text_behind_a_call_is_spoken_again() -> None:
    given = feed(["Hi", "\n", CALL, "\n", "So", " on", ".", "\n"])
    assert (given.token_ids, given.call_token_ids) == ([0, 3, 4, 5, 6], [1, 2, 7])
    assert given.text == "Hi\nSo on."


def test_a_token_that_holds_both_is_the_text_s() -> None:
    given = feed(["See", ":<tool_", 'call>{"name": "f", "arguments": {', "}}</tool_call>!", "?"])
    assert (given.token_ids, given.call_token_ids) == ([0, 1, 4], [2, 3])
    assert given.text == "See:!?"
    assert arguments(given) == ["{}"]


def test_what_turns_out_to_be_no_call_is_spoken() -> None:
    tokens = ["A ", "<tool_call>", '{"x"', ": 1}", "</tool_call>", " b"]
    given = feed(tokens)
    assert given.token_ids == [*range(6)] and not given.call_token_ids and not given.tool_calls
    assert given.text == "".join(tokens)


def test_tokens_without_text_belong_to_what_they_follow_at_the_end() -> None:
    assert feed(["Hi", ""]).token_ids == [0, 1]
    assert feed([CALL, ""]).call_token_ids == [0, 1]
    assert feed([""]).token_ids == [0]


def test_the_answer_ends_with_the_only_call_that_is_wanted() -> None:
    given = feed(["Hi ", "<tool_call>", '{"name": "f", "arguments": {}', "}", "</tool_call>", CALL], parallel=False)
    assert given.stopped
    assert (given.token_ids, given.call_token_ids, arguments(given)) == ([0], [1, 2], ["{}"])


@pytest.mark.parametrize("stop", [["c"], [". "], ["</tool_call>"], ["\n"], ['"}']])
def test_stop_strings_do_not_count_in_calls(stop: list[str]) -> None:
    given = feed(["Hi", "\n", CALL, "\n", CALL], stop)
    assert not given.stopped
    assert (given.text, arguments(given)) == ("Hi", ['{"a": "b. c"}'] * 2)


def test_stop_strings_count_in_text_and_never_across_a_call() -> None:
    assert feed(["Hi", ".", " Bye", CALL], [". B"]) == Piece([0], "Hi", True, [{"token": "Hi"}])
    behind = feed(["Hi", CALL, "Bye", ". ", "B", "!"], [". B"])
    assert behind.stopped
    assert (behind.token_ids, behind.text, len(behind.tool_calls)) == ([0, 2], "HiBye", 2)
    across = feed(["Hi E", CALL, "ND!"], ["END"])
    assert (across.stopped, across.text, across.token_ids) == (False, "Hi END!", [0, 2])


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_any_tokens_give_the_same(stop: list[str]) -> None:
    rng = np.random.default_rng(2)
    for text in (f"One.\n{CALL}\n{CALL} Two <tool {CALL}", f"{CALL}\n", "No call at all <", f"<tool_call>x{CALL}"):
        whole = feed([text], stop)
        said = _said(text)
        for _ in range(150):
            cuts = np.sort(rng.integers(0, len(text) + 1, rng.integers(0, 12))).tolist()
            tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]
            given = feed(tokens, stop)
            assert (given.text, arguments(given)) == (whole.text, arguments(whole))
            assert sorted(given.token_ids + given.call_token_ids) == list(range(len(tokens)))
            begins = np.cumsum([0, *map(len, tokens)])[:-1]
            assert given.token_ids == [i for i, at in enumerate(begins) if said[at]]


def _said(text: str) -> list[bool]:
    parser = ToolCallParser()
    return [bool(span.text) for span in [*parser.push(text), *parser.finish()] for _ in range(span.num_chars)]
