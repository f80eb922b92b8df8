"""What the response thread must survive: senders that fail, callers that die, parameters that any client may send."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.triton.fake_pb_utils import Sender, Tensor

if "triton_python_backend_utils" not in sys.modules:
    pytest.fail("conftest.py provides it")

from triton_omni.triton.responder import Responder
from triton_omni.triton.wakeups import PARAMETER, WakeupReader, is_target

WAIT_S = 60  # for what comes at once


class Event(str):
    finish_reason = "stop"


def _encode(events):
    return [[Tensor("TEXT", ["".join(events)])]] if events else []


@pytest.fixture
def responder() -> Iterator[Responder]:
    responder = Responder("test", poll_s=0.01)
    yield responder
    responder.close()


def _is_answered(responder: Responder) -> bool:
    sender = Sender()
    responder.open(sender, _encode).sink(Event("hello"))
    return sender.finished.wait(WAIT_S)


class Naming(Sender):
    """A request with the parameter of omni_bls's requests."""

    def __init__(self, parameter: object) -> None:
        super().__init__()
        self._parameter = parameter

    def parameters(self) -> str:
        return json.dumps({PARAMETER: self._parameter})


@pytest.mark.parametrize("parameter", ["", "x", "../../etc/passwd:00", 5, True, ["a"]])
def test_a_parameter_of_the_clients_own_is_ignored(responder: Responder, parameter: object) -> None:
    assert not is_target(parameter)
    sender, left = Naming(parameter), threading.Event()
    stream = responder.open(sender, _encode, on_cancel=left.set)
    sender.left = True
    assert left.wait(WAIT_S), "its caller is asked after, as any other"
    stream.sink(Event("cancelled"))
    assert sender.finished.wait(WAIT_S)
    assert _is_answered(responder)


def test_a_request_whose_omni_bls_is_gone_is_taken_back(responder: Responder) -> None:
    reader, left = WakeupReader(), threading.Event()
    _, arrivals = reader.open("talker")
    responder.open(Naming(arrivals.parameter), _encode, on_cancel=left.set)
    reader.close()
    assert left.wait(WAIT_S)


class Refusing(Sender):
    """Triton takes nothing from it, as without shared memory; ``attempts`` is released with each try."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = threading.Semaphore(0)

    def send(self, response=None, flags=0):
        self.attempts.release()
        raise RuntimeError("no shared memory")


def test_a_request_that_cannot_be_ended_takes_no_other_with_it(responder: Responder) -> None:
    sender = Refusing()
    responder.open(sender, _encode).send(Event("hello"))
    for _ in ("the event", "the error that it could not be sent"):
        assert sender.attempts.acquire(timeout=WAIT_S)
    assert _is_answered(responder)


def test_a_request_that_cannot_be_taken_back_takes_no_other_with_it(responder: Responder) -> None:
    sender, asked = Sender(), threading.Event()

    def fail() -> None:
        asked.set()
        raise RuntimeError("the engine is gone")

    responder.open(sender, _encode, on_cancel=fail)
    sender.left = True
    assert asked.wait(WAIT_S)
    assert _is_answered(responder)


def test_a_question_that_fails_is_asked_again(responder: Responder) -> None:
    sender, left, failures = Sender(), threading.Event(), iter([True])

    def is_cancelled() -> bool:
        if next(failures, False):
            raise RuntimeError("no shared memory")
        return True

    sender.is_cancelled = is_cancelled
    responder.open(sender, _encode, on_cancel=left.set)
    assert left.wait(WAIT_S)
    assert _is_answered(responder)
