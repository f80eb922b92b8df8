"""What a talker session sends while its START is on its way and others add to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from triton_omni.pipeline.chunk_policy import ChunkPlan
from triton_omni.pipeline.sessions import TalkerSession
from triton_omni.pipeline.stages import NO_IDS, CodesEvent, Int32, TalkerStart
from triton_omni.pipeline.workers import Workers
from triton_omni.sampling import TalkerSampling

WORDS = np.array([1000, 1001], np.int32)


class Talker:
    """A TalkerStage that notes the text that it gets; ``during`` is called while START is on its way."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self._during = during
        self.heard: list[tuple[list[int], bool]] = []

    def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]:
        self.heard.append((start.token_ids.tolist(), start.text_finished))
        self._during()
        return iter(())

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        self.heard.append((token_ids.tolist(), text_finished))

    def end(self, session_id: str, *, cancel: bool) -> None: ...


class HeldWorkers(Workers):
    """Runs what it has been given when it is told to."""

    def __init__(self) -> None:
        super().__init__("append", 1)
        self.tasks: list[Callable[[], None]] = []

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class LockThenCall:
    """A lock that calls ``then`` once, right after it has been left for the ``number``-th time."""

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left, self._then = number, then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._left -= 1
        if self._left == 0:
            self._then()


def never(error: Exception) -> None:
    raise AssertionError from error


def open_session(talker: Talker, workers: Workers) -> TalkerSession:
    return TalkerSession(talker, "session", ChunkPlan(), 4, workers, never)


def start(session: TalkerSession) -> None:
    session.start(NO_IDS, "ethan", TalkerSampling(), None)


@pytest.mark.parametrize("finished", [False, True])
def test_text_that_comes_while_start_is_on_its_way_follows_it_in_one_append(finished: bool) -> None:
    workers = HeldWorkers()
    talker = Talker(during=lambda: session.add(WORDS, finished))
    session = open_session(talker, workers)
    start(session)
    workers.run()
    assert talker.heard == [([], False), (WORDS.tolist(), finished)]


@pytest.mark.parametrize("finished", [False, True])
def test_text_that_comes_when_start_is_just_through_is_sent_once(finished: bool) -> None:
    workers, talker = HeldWorkers(), Talker()
    session = open_session(talker, workers)
    behind_start = 2  # the first time it is left is before START
    session._state = LockThenCall(behind_start, lambda: session.add(WORDS, finished))  # type: ignore[assignment]
    start(session)
    assert len(workers.tasks) == 1
    workers.run()
    assert talker.heard == [([], False), (WORDS.tolist(), finished)]
