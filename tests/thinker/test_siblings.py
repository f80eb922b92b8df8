"""Replicas of the thinker find each other's requests."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triton_omni.errors import NotFoundError, OmniError, RequestTimeoutError, StageError
from triton_omni.pipeline.stages import PromptRows
from triton_omni.thinker import siblings
from triton_omni.thinker.siblings import Siblings

ROWS = PromptRows(np.arange(15, dtype=np.int32).reshape(3, 5), np.arange(64, dtype=np.uint8), "bfloat16")


class Engine:
    """Knows what it is told to know."""

    def __init__(self, known: dict[str, PromptRows | OmniError] | None = None) -> None:
        self.known = known or {}
        self.aborted: list[str] = []
        self.told = threading.Event()

    def rows(self, request_id: str, timeout_s: float) -> PromptRows:
        found = self.known.get(request_id, NotFoundError("request_id", f"no rows of {request_id!r}"))
        if isinstance(found, OmniError):
            raise found
        return found

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.told.set()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(siblings.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Siblings, Siblings, Engine]]:
    """A replica that knows nothing, and another one with its engine."""
    other = Engine({"theirs": ROWS, "late": RequestTimeoutError("no rows within 1 s", field="thinker")})
    pairs = []
    for number, engine in enumerate((Engine(), other)):
        monkeypatch.setattr(siblings.os, "getpid", lambda number=number: number)
        pairs.append(Siblings(engine, rows_timeout_s=60))
    yield pairs[0], pairs[1], other
    for each in pairs:
        each.close()
    assert list(folder.iterdir()) == []


def test_rows_come_from_the_replica_that_has_them(pair: tuple[Siblings, Siblings, Engine]) -> None:
    for replica in pair[:2]:
        rows = replica.rows("theirs")
        assert rows.dtype == "bfloat16"
        np.testing.assert_array_equal(rows.positions, ROWS.positions)
        np.testing.assert_array_equal(rows.rows, ROWS.rows)


def test_nobody_has_them(pair: tuple[Siblings, Siblings, Engine]) -> None:
    with pytest.raises(NotFoundError, match="no rows of 'unknown'"):
        pair[0].rows("unknown")


def test_the_others_error_is_the_answer(pair: tuple[Siblings, Siblings, Engine]) -> None:
    with pytest.raises(RequestTimeoutError, match="no rows within 1 s"):
        pair[0].rows("late")


def test_an_abort_reaches_all(pair: tuple[Siblings, Siblings, Engine]) -> None:
    pair[0].abort("theirs")
    assert pair[2].told.wait(240)
    assert pair[2].aborted == ["theirs"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[OSError]:
    """What the next six ``accept`` calls fail with, as where no file can be opened any more; empty when they have."""
    accept, left = siblings.socket.socket.accept, queue.SimpleQueue[OSError]()
    for _ in range(6):
        left.put(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    def refuse_or_accept(self: socket.socket) -> Any:
        with contextlib.suppress(queue.Empty):
            raise left.get_nowait()
        return accept(self)

    monkeypatch.setattr(siblings.socket.socket, "accept", refuse_or_accept)
    return left


def test_a_replica_listens_again_when_there_are_descriptors_again(
    refused: queue.SimpleQueue[OSError], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(siblings, "_RETRY_S", 0.001)
    replica, _, _ = request.getfixturevalue("pair")
    np.testing.assert_array_equal(replica.rows("theirs").rows, ROWS.rows)
    assert refused.empty()


def test_a_replica_that_cannot_listen_rests_and_can_be_closed(
    refused: queue.SimpleQueue[OSError], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests, wait = threading.Event(), threading.Event.wait

    def told(event: threading.Event, timeout_s: float | None = None) -> bool:
        if timeout_s == 3600:
            rests.set()
        return wait(event, timeout_s)

    monkeypatch.setattr(siblings, "_RETRY_S", 3600)
    monkeypatch.setattr(threading.Event, "wait", told)
    replica = Siblings(Engine(), rows_timeout_s=60)
    assert rests.wait(240)
    replica.close()
    assert refused.qsize() == 5


def test_a_replica_that_is_gone_has_nothing(folder: Path) -> None:
    dead = siblings.socket.socket(siblings.socket.AF_UNIX, siblings.socket.SOCK_SEQPACKET)
    dead.bind(str(folder / "triton_omni_thinker_1.socket"))
    dead.close()
    alone = Siblings(Engine(), rows_timeout_s=60)
    with pytest.raises(NotFoundError, match="no rows of 'unknown'"):
        alone.rows("unknown")
    alone.close()


def test_a_replica_that_dies_while_it_is_asked_is_a_failure(folder: Path) -> None:
    dying = siblings.socket.socket(siblings.socket.AF_UNIX, siblings.socket.SOCK_SEQPACKET)
    dying.bind(str(folder / "triton_omni_thinker_1.socket"))
    dying.listen()
    threading.Thread(target=lambda: dying.accept()[0].close()).start()
    alone = Siblings(Engine(), rows_timeout_s=60)
    with pytest.raises(StageError, match="the process that served this request died"):
        alone.rows("unknown")
    alone.close()
    dying.close()
