"""Deadlines of many requests on one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Timer:
    """One pending call; ``cancel`` forgets the callback at once, so that nothing it refers to stays alive."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """A heap of calls and the daemon thread that makes them when they are due; callbacks must be short."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` when ``time.monotonic()`` reaches ``when_s``."""
        timer = Timer(callback)
        with self._changed:
            first = self._heap[0][0] if self._heap else None
            heapq.heappush(self._heap, (when_s, next(self._count), timer))
            if first is None or when_s < first:
                self._changed.notify()
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self.call_at(time.monotonic() + delay_s, callback)

    def close(self) -> None:
        """Forget what is pending and end the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (callback := self._next_due()) is not None:
            try:
                callback()
            except Exception:
                logger.exception("a timer's callback failed")
            del callback

    def _next_due(self) -> Callable[[], None] | None:
        """Wait for the next callback that is due; None when closed."""
        with self._changed:
            while not self._closed:
                if not self._heap:
                    self._changed.wait()
                    continue
                when_s, _, timer = self._heap[0]
                wait_s = when_s - time.monotonic()
                if timer.callback is None or wait_s <= 0:
                    heapq.heappop(self._heap)
                    if timer.callback is not None:
                        return timer.callback
                    continue
                del timer
                self._changed.wait(wait_s)
            return None
