"""The response thread and the wakeups, with a fake of Triton's module."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.triton.fake_pb_utils import Sender, Tensor
from triton_omni.errors import CapacityError, InvalidRequestError, StageError

if "triton_python_backend_utils" not in sys.modules:
    pytest.fail("conftest.py provides it")

from triton_omni.triton import wakeups
from triton_omni.triton.responder import Responder
from triton_omni.triton.wakeups import Record, WakeupReader, WakeupWriter

POLL_S = 0.01
WAIT_S = 60  # for what comes at once


class Event(str):
    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.endswith(".") else None


def _encode(events):
    return [[Tensor("TEXT", ["".join(events)])]] if events else []


@pytest.fixture(params=[False, True], ids=["one thread sends", "senders send"])
def responder(request: pytest.FixtureRequest) -> Iterator[Responder]:
    responder = Responder("test", poll_s=POLL_S, senders_may_wait=request.param)
    yield responder
    responder.close()


def _texts(sender: Sender) -> list[str]:
    return [str(response.tensors["TEXT"][0]) for response, _ in sender.sent if response and not response.error]


def test_everything_leaves_in_order_and_ends_once(responder: Responder) -> None:
    sender = Sender()
    stream = responder.open(sender, _encode)
    for part in ("a", "b", "c", "d."):
        stream.sink(Event(part))
    stream.sink(Event("late"))
    stream.fail(CapacityError("late"))
    assert sender.finished.wait(WAIT_S)
    assert "".join(_texts(sender)) == "abcd."
    assert [final for _, final in sender.sent] == [False] * (len(sender.sent) - 1) + [True]


def _block(responder: Responder, gate: threading.Event) -> threading.Thread:
    """A response that takes until the gate opens."""
    begun = threading.Event()
    stream = responder.open(Sender(), lambda _: [(begun.set(), gate.wait(WAIT_S)) and [Tensor("TEXT", ["x"])]])
    thread = threading.Thread(target=stream.send, args=(Event("x."),), kwargs={"final": True})
    thread.start()
    assert begun.wait(WAIT_S)
    return thread


def test_what_gathers_while_a_send_takes_its_time_leaves_together(responder: Responder) -> None:
    gate, sender = threading.Event(), Sender()
    blocking = _block(responder, gate)
    stream = responder.open(sender, _encode)
    for part in ("a", "b", "c."):
        stream.sink(Event(part))
    gate.set()
    assert sender.finished.wait(WAIT_S)
    assert _texts(sender) == ["abc."] and len(sender.sent) == 1
    blocking.join()


def test_a_sender_that_may_wait_sends_itself_and_wakes_nobody() -> None:
    responder = Responder("test", poll_s=60, senders_may_wait=True)
    sender, threads = Sender(), []
    stream = responder.open(sender, lambda events: threads.append(threading.current_thread()) or _encode(events))
    stream.sink(Event("a"))
    assert _texts(sender) == ["a"]
    stream.sink(Event("b."))
    assert _texts(sender) == ["a", "b."] and sender.finished.is_set()
    assert set(threads) == {threading.current_thread()}
    responder.close()


def test_events_of_many_threads_keep_their_streams_order(responder: Responder) -> None:
    senders = [Sender() for _ in range(8)]

    def speak(sender: Sender) -> None:
        stream = responder.open(sender, _encode)
        for number in range(200):
            stream.sink(Event(f"{number},"))
        stream.sink(Event("."))

    threads = [threading.Thread(target=speak, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread, sender in zip(threads, senders, strict=True):
        thread.join()
        assert sender.finished.wait(WAIT_S)
        assert "".join(_texts(sender)) == "".join(f"{number}," for number in range(200)) + "."


def test_a_failed_response_takes_the_request_back_outside_its_senders_locks(responder: Responder) -> None:
    sender, lock, taken_back = Sender(), threading.Lock(), threading.Event()

    def on_cancel() -> None:
        with lock:
            taken_back.set()

    stream = responder.open(sender, lambda events: 1 / 0 if "a" in events else _encode(events), on_cancel=on_cancel)
    with lock:
        stream.send(Event("a"))
        stream.send(Event("b."), final=True)
    assert sender.finished.wait(WAIT_S) and taken_back.is_set()
    assert len(sender.sent) == 1 and sender.sent[0][0].error, "a part is missing: the rest is none of the caller's"


def test_errors_are_wire_lines_and_final(responder: Responder) -> None:
    sender = Sender()
    stream = responder.open(sender, _encode)
    stream.sink(Event("a"))
    stream.sink(InvalidRequestError("messages", "must be a list"))
    assert sender.finished.wait(WAIT_S)
    assert sender.sent[-1][0].error == "invalid_request [messages]: must be a list"


def test_a_guard_ends_the_request_whatever_is_raised(responder: Responder) -> None:
    for error, line in (
        (CapacityError("full"), "overloaded: full"),
        (ZeroDivisionError("oh"), "stage_failed [talker]: ZeroDivisionError: oh"),
    ):
        sender = Sender()
        with responder.open(sender, _encode).guard("talker"):
            raise error
        assert sender.finished.wait(WAIT_S)
        assert sender.sent[-1][0].error == line


def test_a_response_that_cannot_be_built_ends_the_request(responder: Responder) -> None:
    sender, taken_back = Sender(), threading.Event()
    stream = responder.open(sender, lambda _: 1 / 0, on_cancel=taken_back.set)
    stream.send(Event("a"))
    assert sender.finished.wait(WAIT_S) and taken_back.is_set()
    assert sender.sent[-1][0].error.startswith("stage_failed [response]")
    stream.send(Event("b."), final=True)


def test_a_caller_that_leaves_is_noticed_once_and_still_gets_final(responder: Responder) -> None:
    sender, calls, left = Sender(), [], threading.Event()
    stream = responder.open(sender, _encode, on_cancel=lambda: (calls.append(1), left.set()))
    sender.left = True
    assert left.wait(WAIT_S)
    assert not sender.finished.wait(5 * POLL_S)
    stream.sink(Event("cancelled."))
    assert sender.finished.wait(WAIT_S)
    assert calls == [1]


class AskingSender(Sender):
    def __init__(self, wakeup: str) -> None:
        super().__init__()
        self.parameters = lambda: '{"omni_wakeup": "%s"}' % wakeup  # noqa: UP031


def test_a_stream_announces_each_response_and_its_end(responder: Responder, reader: WakeupReader) -> None:
    _, arrivals = reader.open("talker")
    stream = responder.open(AskingSender(arrivals.parameter), _encode)
    stream.sink(Event("a"))
    assert arrivals.wait(1)
    stream.sink(Event("b."))
    assert arrivals.wait(2)
    assert not arrivals.wait(3)


def test_silence_is_an_error_of_the_stage(reader: WakeupReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "SILENCE_S", 0.05)
    _, arrivals = reader.open("talker")
    with pytest.raises(StageError, match="nothing was heard"):
        arrivals.wait(1)


def test_an_open_stream_says_that_it_lives(
    responder: Responder, reader: WakeupReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For three times the silence that is allowed; one of twenty does, where the machine stands still now and then."""
    monkeypatch.setattr(wakeups, "SILENCE_S", 20 * POLL_S)

    def is_heard() -> bool:
        _, arrivals = reader.open("talker")
        stream = responder.open(AskingSender(arrivals.parameter), _encode)
        timer = threading.Timer(60 * POLL_S, lambda: stream.sink(Event("a.")))
        timer.start()
        try:
            return arrivals.wait(1)
        except StageError:
            return False
        finally:
            timer.join()

    assert any(is_heard() for _ in range(20))


def test_streams_do_not_hear_each_other_and_forgotten_ones_nothing(reader: WakeupReader) -> None:
    (first_key, first), (_, second) = reader.open("talker"), reader.open("thinker")
    reader.forget(first_key)
    writer = WakeupWriter()
    writer.write(first.parameter, Record.RESPONSE)
    writer.write(second.parameter, Record.RESPONSE)
    assert second.wait(1)
    assert first._count == 0


def test_a_pipe_that_is_not_there_has_no_reader() -> None:
    assert not WakeupWriter().write(f"{'0' * 32}:{'0' * 32}", Record.RESPONSE)


def test_a_file_in_the_place_of_the_pipe_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups.tempfile, "gettempdir", lambda: str(tmp_path))
    number = "a" * 32
    file = tmp_path / f"triton_omni_{number}.fifo"
    file.write_text("mine")
    WakeupWriter().write(f"{number}:{'0' * 32}", Record.RESPONSE)
    assert file.read_text() == "mine"


def test_a_reader_that_is_gone_is_nobody_to_tell() -> None:
    reader, writer = WakeupReader(), WakeupWriter()
    _, arrivals = reader.open("talker")
    writer.write(arrivals.parameter, Record.RESPONSE)
    reader.close()
    for _ in range(2):
        writer.write(arrivals.parameter, Record.RESPONSE)
    assert not os.path.exists(reader._path)


@pytest.mark.parametrize("ends", [True, False], ids=["its last event", "an event"])
def test_nothing_is_sent_to_an_omni_bls_that_is_gone(ends: bool) -> None:
    """Triton's send to it would never return."""
    responder, reader = Responder("test", poll_s=60), WakeupReader()
    _, arrivals = reader.open("thinker")
    sender, taken_back = AskingSender(arrivals.parameter), threading.Semaphore(0)
    stream = responder.open(sender, _encode, on_cancel=taken_back.release)
    stream.sink(Event("a"))
    assert arrivals.wait(1)
    reader.close()
    stream.sink(Event("b." if ends else "b"))
    assert taken_back.acquire(timeout=WAIT_S)
    stream.sink(Event("c."))
    responder.close()
    assert _texts(sender) == ["a"]
    assert not taken_back.acquire(blocking=False)


def test_many_open_requests_are_asked_less_often_each(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_omni.triton.responder.MAX_POLLS_PER_S", 0.001)
    senders, asked = [Sender() for _ in range(3)], []
    first_round, again = threading.Event(), threading.Event()

    def ask(sender: Sender) -> bool:
        if sender in asked:
            again.set()
        asked.append(sender)
        if len(asked) == len(senders):
            first_round.set()
        return False

    streams, opened = [], threading.Event()
    responder._ready.put(lambda: opened.wait(WAIT_S))  # its thread: how rarely it asks depends on how many it finds
    for sender in senders:
        sender.is_cancelled = partial(ask, sender)
        streams.append(responder.open(sender, _encode))
    opened.set()
    assert first_round.wait(WAIT_S)
    assert not again.wait(10 * POLL_S), "each is due again in more than half an hour"
    for stream in streams:
        stream.sink(Event("a."))


def test_signs_of_life_leave_between_the_events_and_not_after_the_last(responder: Responder) -> None:
    sender, shown = Sender(), threading.Semaphore(0)

    def encode(events):
        if "sign" in events:
            shown.release()
        return _encode(events)

    stream = responder.open(sender, encode)
    stream.sink(Event("a"))
    stream.show_life(Event("sign"), POLL_S)
    for _ in range(3):
        assert shown.acquire(timeout=WAIT_S)
    stream.sink(Event("b."))
    assert sender.finished.wait(WAIT_S)
    threading.Event().wait(5 * POLL_S)
    texts = _texts(sender)
    assert (texts[0], texts[-1]) == ("a", "b.")
    assert set(texts[1:-1]) == {"sign"}
    assert len(texts) >= 5


def test_messages_are_counted(responder: Responder) -> None:
    gate, sender = threading.Event(), Sender()
    blocking = _block(responder, gate)
    stream = responder.open(sender, lambda events: [[Tensor("TEXT", [event])] for event in events])
    for part in ("a", "b", "c."):
        stream.sink(Event(part))
    gate.set()
    assert sender.finished.wait(WAIT_S)
    blocking.join()
    assert responder.messages() == {"request": 2, "response": 4}


def test_a_sender_outlives_the_last_question(responder: Responder) -> None:
    sender = Sender()
    asked = threading.Event()
    sender.is_cancelled = lambda: asked.set()
    stream = responder.open(sender, _encode)
    assert asked.wait(WAIT_S)
    stream.sink(Event("a."))
    assert sender.finished.wait(WAIT_S)
    reference = weakref.ref(sender)
    del sender, stream
    gc.collect()
    assert reference() is not None


def test_children_of_omni_bls_are_not_asked_whether_they_are_cancelled(
    responder: Responder, reader: WakeupReader
) -> None:
    _, arrivals = reader.open("talker")
    sender = AskingSender(arrivals.parameter)
    sender.left = True
    stream = responder.open(sender, _encode, on_cancel=lambda: pytest.fail("asked"))
    threading.Event().wait(5 * POLL_S)
    stream.sink(Event("a."))
    assert arrivals.wait(1)
