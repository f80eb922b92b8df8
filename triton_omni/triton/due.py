"""Which of a model's responses leaves first when many wait: the one that is due first.

In the order of arrival, whoever has nothing yet waits behind what brings others further ahead than they can listen.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

FIRST_EVENTS = 2
"""Of the thinker the prompt and the first text, of the talker the acknowledgement and the first codes, of omni_bls the
start and the first text."""
HEAD_START_S = 1.0
WAY_S = 0.2
"""What is left of a chunk's way to the player from here, on a machine that is busy."""
AT_ONCE = 0.0
AT_LAST = float("inf")


class DueTimes(Generic[T]):
    """When the events of one stream are due, for a caller whose player starts with the first sound that it gets.

    Its FIRST_EVENTS and its first sound are what somebody waits for who has nothing yet: they are HEAD_START_S overdue
    from the start. Later sound is due WAY_S before the player runs dry, and anything else at once. ``play_s``: how long
    an event plays; None where none does. Not thread-safe.
    """

    __slots__ = ("_count", "_play_s", "_runs_dry_s")

    def __init__(self, play_s: Callable[[T], float] | None) -> None:
        self._play_s = play_s
        self._count = 0
        self._runs_dry_s = 0.0

    def of(self, events: Sequence[T]) -> float:
        """As time.monotonic() tells it, of ``events`` that come together, after all those of earlier calls."""
        now_s = due_s = time.monotonic()
        is_first = bool(events) and self._count < FIRST_EVENTS
        self._count += len(events)
        if self._play_s is not None and (sound_s := sum(map(self._play_s, events))):
            is_first |= not self._runs_dry_s
            runs_dry_s = max(self._runs_dry_s, now_s)
            self._runs_dry_s = runs_dry_s + sound_s
            due_s = max(runs_dry_s - WAY_S, now_s)
        return now_s - HEAD_START_S if is_first else due_s


class DueQueue(Generic[T]):
    """Items in the order in which they are due, and of arrival among those due together. Thread-safe without a lock:
    heapq's functions do not let go of the GIL, and what they compare are numbers, no two pairs of them the same.
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._count: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item

    def put(self, item: T, due_s: float = AT_ONCE) -> None:
        heapq.heappush(self._items, (due_s, next(self._numbers), item))
        self._count.put(None)

    def get(self, timeout: float) -> T:
        """Raises queue.Empty when there is none for ``timeout`` seconds."""
        self._count.get(timeout=timeout)
        return heapq.heappop(self._items)[2]
