"""Which of a model's responses leaves first when many wait: the one that is due first.

In the order of arrival, whoever has nothing yet waits behind what brings others further ahead than they can listen.
Nothing is held back: where nothing else waits, all leaves at once.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

FIRST_EVENTS = 3
"""Of the talker the acknowledgement and the codes of two chunks, of the thinker the prompt and two pieces of text, of
omni_bls the start and two of text."""
FIRST_SOUNDS = 2
"""A player that starts with the first one, which is short, waits for the second."""
HEAD_START_S = 1.0
AT_ONCE = 0.0
AT_LAST = float("inf")


class DueTimes(Generic[T]):
    """When the events of one stream are due: its FIRST_EVENTS and FIRST_SOUNDS are what somebody waits for who has
    nothing yet, or little, and HEAD_START_S overdue from the start; all else is due when it comes. ``is_sound``: None
    where sound comes with FIRST_EVENTS or not at all. Not thread-safe.
    """

    __slots__ = ("_count", "_is_sound", "_sounds")

    def __init__(self, is_sound: Callable[[T], bool] | None) -> None:
        self._is_sound = is_sound
        self._count = self._sounds = 0

    def of(self, events: Sequence[T]) -> float:
        """As time.monotonic() tells it, of ``events`` that come together, after all those of earlier calls."""
        is_first = bool(events) and self._count < FIRST_EVENTS
        self._count += len(events)
        if self._is_sound is not None and self._sounds < FIRST_SOUNDS:
            sounds = sum(map(self._is_sound, events))
            is_first = is_first or sounds > 0
            self._sounds += sounds
        now_s = time.monotonic()
        return now_s - HEAD_START_S if is_first else now_s


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
