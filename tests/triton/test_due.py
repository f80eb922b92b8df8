"""What leaves first when many responses wait, with a fake of Triton's module and of the clock."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tests.triton.fake_pb_utils import Sender, Tensor

if "triton_python_backend_utils" not in sys.modules:
    pytest.fail("conftest.py provides it")

from triton_omni.triton import due
from triton_omni.triton.due import (
    AT_LAST,
    FIRST_EVENTS,
    FIRST_SOUNDS,
    HEAD_START_S,
    DueQueue,
    DueTimes,
)
from triton_omni.triton.responder import Responder

WAIT_S = 60  # for what comes at once


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(due, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_a_streams_first_events_are_overdue_and_later_ones_due_at_once(clock: Clock) -> None:
    times = DueTimes[str](None)
    assert [times.of("a") for _ in range(FIRST_EVENTS)] == [clock.now_s - HEAD_START_S] * FIRST_EVENTS
    assert times.of("b") == clock.now_s
    assert DueTimes[str](None).of(()) == clock.now_s, "an end that brings nothing is nobody's first"


def test_the_first_sounds_are_overdue_wherever_they_come(clock: Clock) -> None:
    times = DueTimes[str](lambda event: event == "♪")
    times.of(["a"] * FIRST_EVENTS)
    assert times.of(["b"]) == clock.now_s
    assert [times.of(["b", "♪"]) for _ in range(FIRST_SOUNDS)] == [clock.now_s - HEAD_START_S] * FIRST_SOUNDS
    assert times.of(["♪"]) == clock.now_s


def test_a_queue_gives_what_is_due_first_and_of_equals_what_came_first() -> None:
    items = DueQueue[object]()
    first, second = object(), object()
    for item, due_s in ((None, AT_LAST), ("late", 3.0), (first, 2.0), (second, 2.0), ("soon", 1.0)):
        items.put(item, due_s)
    items.put("at once")
    assert [items.get(WAIT_S) for _ in range(6)] == ["at once", "soon", first, second, "late", None]
    with pytest.raises(queue.Empty):
        items.get(0)


class Event(str):
    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.endswith(".") else None

    @property
    def is_sound(self) -> bool:
        return "♪" in self


@pytest.fixture(params=[False, True], ids=["one thread sends", "senders send"])
def blocked(request: pytest.FixtureRequest, clock: Clock) -> Iterator[tuple[Responder, Callable[[], None]]]:
    """A responder that sends nothing until it is let go, and for which no time passes."""
    responder = Responder("test", poll_s=60, senders_may_wait=request.param)
    begun, gate = threading.Event(), threading.Event()
    stream = responder.open(Sender(), lambda _: [(begun.set(), gate.wait(WAIT_S)) and [Tensor("TEXT", ["x"])]])
    thread = threading.Thread(target=stream.send, args=(Event("x."),), kwargs={"final": True})
    thread.start()
    assert begun.wait(WAIT_S)
    yield responder, gate.set
    gate.set()
    thread.join()
    responder.close()


def test_who_has_nothing_yet_goes_before_what_waits(blocked: tuple[Responder, Callable[[], None]]) -> None:
    responder, let_go = blocked
    sent: list[str] = []

    def encode(events):
        sent.append("".join(events))
        return [[Tensor("TEXT", [sent[-1]])]]

    senders = [Sender() for _ in range(4)]
    streams = [responder.open(sender, encode, is_sound=lambda event: event.is_sound) for sender in senders]
    had_before = [FIRST_EVENTS * "a" + FIRST_SOUNDS * "♪"] * 2 + [FIRST_EVENTS * "a", ""]
    for stream, had in zip(streams, had_before, strict=True):
        for event in had:
            stream._due_times.of([Event(event)])
    for stream, event in zip(streams, ("more.", "sound♪.", "first sound♪.", "first."), strict=True):
        stream.sink(Event(event))
    let_go()
    assert all(sender.finished.wait(WAIT_S) for sender in senders)
    assert sent == ["first sound♪.", "first.", "more.", "sound♪."]


def test_what_waits_leaves_with_what_is_due_sooner_and_in_its_order(
    blocked: tuple[Responder, Callable[[], None]],
) -> None:
    responder, let_go = blocked
    sender, other = Sender(), Sender()

    def encode(events):
        return [[Tensor("TEXT", ["".join(events)])]] if events else []

    stream = responder.open(sender, encode, is_sound=lambda event: event.is_sound)
    stream._due_times.of([Event("a")] * FIRST_EVENTS)
    stream.sink(Event("c"))
    stream.sink(Event("♪"))  # its first: the stream is queued once more, ahead of where it stands
    stream.sink(Event("d."))
    responder.open(other, encode).sink(Event("e."))
    let_go()
    assert sender.finished.wait(WAIT_S) and other.finished.wait(WAIT_S)
    assert [str(response.tensors["TEXT"][0]) for response, _ in sender.sent] == ["c♪d."]
