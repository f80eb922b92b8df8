"""Rows are handed out once, to those who asked, and not kept for ever."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.thinker.support import TIMEOUT_S
from triton_omni.errors import InvalidRequestError, NotFoundError, OmniError, RequestTimeoutError, StageError
from triton_omni.pipeline.stages import PromptRows
from triton_omni.thinker.rows_shelf import RowsShelf

ROWS = PromptRows(np.zeros((3, 2), np.int32), np.ones(4, np.uint8), "float32")


def test_rows_are_taken_once() -> None:
    shelf = RowsShelf("thinker", 2)
    shelf.open("a", wanted=True)
    with pytest.raises(RequestTimeoutError):
        shelf.take("a", 0.01)
    shelf.put("a", ROWS)
    assert shelf.take("a", 0) is ROWS
    with pytest.raises(NotFoundError, match="fetched"):
        shelf.take("a", 0)
    shelf.close("a")
    with pytest.raises(NotFoundError, match="no open request 'a'"):
        shelf.take("a", 0)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody waits for rows; who changes a shelf then does so after the wait has begun."""
    waits, wait_for = threading.Event(), threading.Condition.wait_for

    def told(condition: threading.Condition, *args: Any) -> bool:
        waits.set()  # the condition's lock is held
        return wait_for(condition, *args)

    monkeypatch.setattr(threading.Condition, "wait_for", told)
    return waits


def test_a_waiting_caller_is_woken(waiting: threading.Event) -> None:
    shelf, got = RowsShelf("thinker", 2), []
    shelf.open("a", wanted=True)
    thread = threading.Thread(target=lambda: got.append(shelf.take("a", TIMEOUT_S)))
    thread.start()
    assert waiting.wait(TIMEOUT_S)
    shelf.close("a")  # the answer may end before its rows have come
    shelf.put("a", ROWS)
    thread.join(TIMEOUT_S)
    assert got == [ROWS]


def test_of_two_who_wait_one_gets_the_rows_and_the_other_is_told(waiting: threading.Event) -> None:
    shelf, got = RowsShelf("thinker", 2), []

    def wait() -> None:
        try:
            got.append(shelf.take("a", TIMEOUT_S))
        except OmniError as error:
            got.append(error)

    shelf.open("a", wanted=True)
    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        waiting.clear()
        thread.start()
        assert waiting.wait(TIMEOUT_S)
    shelf.put("a", ROWS)
    for thread in threads:
        thread.join()
    [error] = [each for each in got if each is not ROWS]
    assert isinstance(error, NotFoundError) and "have been fetched" in error.message


def test_only_the_last_ones_outlive_their_request() -> None:
    shelf = RowsShelf("thinker", 2)
    for name in "abc":
        shelf.open(name, wanted=True)
        shelf.put(name, ROWS)
        shelf.close(name)
    assert shelf.take("b", 0) is shelf.take("c", 0) is ROWS
    for name in "abc":
        with pytest.raises(NotFoundError, match=f"no open request '{name}'"):
            shelf.take(name, 0)


def test_what_ends_a_request_reaches_who_waits_for_its_rows(waiting: threading.Event) -> None:
    shelf, raised = RowsShelf("thinker", 2), []

    def wait() -> None:
        with pytest.raises(StageError) as error:
            shelf.take("a", TIMEOUT_S)
        raised.append(error.value)

    shelf.open("a", wanted=True)
    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(TIMEOUT_S)
    shelf.close("a", StageError("thinker", "died"))
    thread.join(TIMEOUT_S)
    assert [error.message for error in raised] == ["died"]


def test_who_did_not_ask_gets_nothing() -> None:
    shelf = RowsShelf("thinker", 2)
    with pytest.raises(NotFoundError):
        shelf.take("nobody", 0)
    shelf.open("a", wanted=False)
    shelf.put("a", ROWS)
    with pytest.raises(InvalidRequestError) as raised:
        shelf.take("a", 0)
    assert raised.value.field == "want_rows"
    shelf.close("a")
    shelf.open("b", wanted=True)
    shelf.put("b", ROWS)
    shelf.close("b")
    shelf.drop("b")
    with pytest.raises(NotFoundError):
        shelf.take("b", 0)
