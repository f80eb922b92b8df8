from __future__ import annotations

import gc
import threading
import time
import weakref

from tests.pipeline.support import LIMIT_S
from triton_omni.pipeline.timers import Timers
from triton_omni.pipeline.workers import Workers


def held(timers: Timers) -> threading.Event:
    """Their thread is in a callback until the event: what is due meanwhile comes after it."""
    entered, go_on = threading.Event(), threading.Event()
    timers.call_later(0, lambda: entered.set() or go_on.wait(LIMIT_S))
    assert entered.wait(LIMIT_S)
    return go_on


def test_timers_fire_in_order_of_their_time() -> None:
    timers, fired, done = Timers("test"), [], threading.Event()
    go_on = held(timers)
    now_s = time.monotonic()
    timers.call_at(now_s + 0.03, done.set)
    for delay_s in (0.02, 0.01, 0.015):
        timers.call_at(now_s + delay_s, lambda d=delay_s: fired.append(d))
    go_on.set()
    assert done.wait(LIMIT_S)
    assert fired == [0.01, 0.015, 0.02]
    timers.close()


def test_a_cancelled_timer_never_fires_and_keeps_nothing_alive() -> None:
    class Thing:
        def call(self) -> None:
            fired.append(self)

    timers, fired, thing = Timers("test"), [], Thing()
    go_on = held(timers)
    timer, alive = timers.call_later(0.01, thing.call), weakref.ref(thing)
    timer.cancel()
    del thing
    gc.collect()
    assert alive() is None
    done = threading.Event()
    timers.call_later(0.02, done.set)
    go_on.set()
    assert done.wait(LIMIT_S)
    assert not fired
    timers.close()


def test_a_failing_callback_does_not_stop_the_others() -> None:
    timers, done = Timers("test"), threading.Event()
    timers.call_later(0, lambda: 1 / 0)
    timers.call_later(0.001, done.set)
    assert done.wait(LIMIT_S)
    timers.close()


def test_workers_use_as_many_threads_as_needed_and_no_more_than_allowed() -> None:
    workers, go_on, running = Workers("test", 3), threading.Event(), threading.Semaphore(0)

    def task() -> None:
        running.release()
        assert go_on.wait(LIMIT_S)

    def threads() -> int:
        return sum(thread.name.startswith("omni-test-") for thread in threading.enumerate())

    for count in (1, 2, 3):
        workers.submit(task)
        assert running.acquire(timeout=LIMIT_S)
        assert threads() == count
    workers.submit(task)
    assert not running.acquire(timeout=0.02)
    assert threads() == 3
    go_on.set()
    assert running.acquire(timeout=LIMIT_S)
    workers.submit(lambda: 1 // 0)
    done = threading.Event()
    workers.submit(done.set)
    assert done.wait(LIMIT_S)
    workers.close(LIMIT_S)
    assert threads() == 0
