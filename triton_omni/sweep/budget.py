"""How many requests a point of the sweep may have, so that a call ends in its time."""

from __future__ import annotations

import time

MIN_WAVES = 2
FULL_WAVES = 10


class Budget:
    """``total_s`` None: no limit. Knows how long a wave (one request in every place) took where it was measured."""

    def __init__(self, total_s: float | None) -> None:
        self._ends_s = None if total_s is None else time.monotonic() + total_s
        self._waves_s: dict[tuple[str, int], float] = {}

    def left_s(self) -> float:
        return float("inf") if self._ends_s is None else self._ends_s - time.monotonic()

    def took(self, row: str, concurrency: int, wave_s: float) -> None:
        self._waves_s[row, concurrency] = wave_s

    def expected_wave_s(self, row: str, concurrency: int) -> float:
        """The longest that is known of this row at less, or of an earlier one at as much; 0 when nothing is."""
        near = [wave for (name, level), wave in self._waves_s.items() if (name == row) != (level == concurrency)]
        return max(near, default=0.0)

    def requests(self, concurrency: int, wave_s: float, points_left: int) -> int:
        """Whole waves that fit into this point's share of the time left; 0 when MIN_WAVES do not fit into all of it."""
        if MIN_WAVES * wave_s > self.left_s():
            return 0
        share_s = self.left_s() / points_left
        waves = FULL_WAVES if share_s >= FULL_WAVES * wave_s else max(MIN_WAVES, int(share_s / wave_s))
        return waves * concurrency
