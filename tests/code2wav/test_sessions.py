"""A request's vocoder session ends while its engine decodes: nobody waits for a forward, every slot comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.pipeline.support import LIMIT_S, Counted
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.code2wav.runner import Row
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.errors import InvalidRequestError, NotFoundError, OmniError, RequestCancelledError, StageError
from triton_omni.pipeline.local import LocalCode2Wav
from triton_omni.pipeline.sessions import VocoderSession
from triton_omni.pipeline.stages import CodesChunk

SLOTS = 2


class HeldRunner:
    """A RowDecoder whose forwards wait while it is held; each frame gives one sample, its slot's number."""

    max_step_frames = 64

    def __init__(self, shape: Code2WavShape) -> None:
        self.shape = shape
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def decode(self, rows: Sequence[Row], finish: Any = None) -> list[np.ndarray]:
        self.entered.set()
        assert self.go_on.wait(2 * LIMIT_S)
        if self.error is not None:
            raise self.error
        return [np.full(len(row.codes), row.slot, np.int16) for row in rows]


class Call(threading.Thread):
    """A call on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except OmniError as error:
            self.result = error

    def get(self) -> Any:
        self.join(LIMIT_S)
        assert not self.is_alive(), "the call still waits"
        return self.result


class Vocoder:
    """The engine over a held runner, and its stage, which counts."""

    def __init__(self, shape: Code2WavShape) -> None:
        self.runner = HeldRunner(shape)
        self.lost = False
        self.engine = StreamingEngine(self.runner, max_sessions=SLOTS, idle_timeout_s=600, is_lost=lambda: self.lost)
        self.stage = Counted(LocalCode2Wav(self.engine))
        self.codes = np.zeros((4, shape.code_groups), np.int32)

    def session(self, session_id: str) -> VocoderSession:
        return VocoderSession(self.stage, session_id)

    def in_forward(self, session: VocoderSession, *, end: bool = False) -> Call:
        """A chunk of ``session`` in a forward that lasts until ``go_on``."""
        call = Call(lambda: session.decode(self.codes, end=end))
        assert self.runner.entered.wait(LIMIT_S)
        return call

    def ends(self, session_id: str) -> int:
        return sum(chunk.end for _, chunk in self.stage.calls if chunk.session_id == session_id)

    def assert_all_slots_are_back(self) -> None:
        assert self.engine.stats() == {"running": 0, "slots_free": SLOTS, "expired": 0}
        chunks = [CodesChunk(f"new {i}", self.codes, start=True) for i in range(SLOTS)]
        waves = self.engine.decode(chunks)
        assert {int(wave[0]) for wave in waves if isinstance(wave, np.ndarray)} == set(range(SLOTS))


@pytest.fixture
def vocoder(shape: Code2WavShape) -> Iterator[Vocoder]:
    one = Vocoder(shape)
    yield one
    one.runner.go_on.set()


def closed(session: VocoderSession) -> Any:
    """Whether END is left to who has closed it."""
    return Call(session.close).get()


def test_close_does_not_wait_for_the_forward(vocoder: Vocoder) -> None:
    session = vocoder.session("a")
    decoding = vocoder.in_forward(session)
    assert not closed(session)
    assert decoding.is_alive()
    assert isinstance(Call(lambda: session.decode(vocoder.codes, end=False)).get(), RequestCancelledError)
    assert vocoder.ends("a") == 0  # it would overtake the chunk
    vocoder.runner.go_on.set()
    decoding.get()
    assert vocoder.ends("a") == 1
    vocoder.assert_all_slots_are_back()


def test_close_twice_from_two_sides_ends_once(vocoder: Vocoder) -> None:
    session = vocoder.session("a")
    decoding = vocoder.in_forward(session)
    assert not any([closed(session), closed(session)])
    vocoder.runner.go_on.set()
    decoding.get()
    assert not closed(session)
    assert vocoder.ends("a") == 1
    vocoder.assert_all_slots_are_back()


def test_the_last_chunk_is_the_end(vocoder: Vocoder) -> None:
    session = vocoder.session("a")
    decoding = vocoder.in_forward(session, end=True)
    assert not closed(session)
    vocoder.runner.go_on.set()
    assert decoding.get().size == 4
    assert not closed(session)
    assert vocoder.ends("a") == 1
    vocoder.assert_all_slots_are_back()


def test_who_closes_between_two_chunks_ends_once(vocoder: Vocoder) -> None:
    vocoder.runner.go_on.set()
    session, never_opened = vocoder.session("a"), vocoder.session("b")
    session.decode(vocoder.codes, end=False)
    assert [session.close(), session.close(), never_opened.close()] == [True, False, False]
    session.end()
    assert [vocoder.ends("a"), vocoder.ends("b")] == [1, 0]
    vocoder.assert_all_slots_are_back()


def test_close_does_not_wait_for_another_sessions_forward(vocoder: Vocoder) -> None:
    vocoder.runner.go_on.set()
    session = vocoder.session("a")
    session.decode(vocoder.codes, end=False)
    vocoder.runner.go_on.clear()
    vocoder.runner.entered.clear()
    other = vocoder.session("b")
    decoding = vocoder.in_forward(other)
    assert closed(session)
    ending = Call(session.end)
    vocoder.runner.go_on.set()
    ending.get()
    assert decoding.get().tolist() == [1] * 4  # its own slot's samples, whoever ended meanwhile
    assert other.close()
    other.end()
    vocoder.assert_all_slots_are_back()


@pytest.mark.parametrize("lost", [True, False])
def test_the_forward_fails_after_the_close(vocoder: Vocoder, lost: bool) -> None:
    session = vocoder.session("a")
    decoding = vocoder.in_forward(session)
    assert not closed(session)
    vocoder.runner.error, vocoder.lost = RuntimeError("CUDA error"), lost
    vocoder.runner.go_on.set()
    assert isinstance(decoding.get(), StageError if lost else NotFoundError)  # the END's: it is the Triton sequence's
    assert not closed(session)
    assert vocoder.ends("a") == 1
    assert vocoder.engine.stats() == {"running": 0, "slots_free": SLOTS, "expired": 0}


def test_the_engine_closes_before_the_end(vocoder: Vocoder) -> None:
    session = vocoder.session("a")
    decoding = vocoder.in_forward(session)
    assert not closed(session)
    closing = Call(vocoder.engine.close)
    vocoder.runner.go_on.set()
    decoding.get()
    closing.get()
    assert vocoder.ends("a") == 1
    assert vocoder.engine.stats() == {"running": 0, "slots_free": SLOTS, "expired": 0}


def test_the_same_id_again_at_once(vocoder: Vocoder) -> None:
    """It is refused until its first session's END is through; neither takes the other's slot."""
    first, again = vocoder.session("a"), vocoder.session("a")
    decoding = vocoder.in_forward(first)
    assert not closed(first)
    too_early = Call(lambda: again.decode(vocoder.codes, end=False))
    vocoder.runner.go_on.set()
    decoding.get()
    outcome = too_early.get()
    assert isinstance(outcome, (np.ndarray, InvalidRequestError)), outcome
    if again.close():
        Call(again.end).get()
    later = vocoder.session("a")
    assert later.decode(vocoder.codes, end=False).size == 4
    assert later.close()
    later.end()
    vocoder.assert_all_slots_are_back()
