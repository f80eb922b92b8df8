"""How chunks of different lengths share forwards.

State makes chunks divisible at no cost, so that rows of 4, 8 and 25 frames need no padding: all three advance 4
frames together, the two longer ones 4 more, the last one 17. Where another step costs more than padding would (24 and
25 frames), the shorter row is padded. ``plan`` finds the cheapest such staircase.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One forward: ``rows`` advance together from their frame ``start`` by up to ``frames`` (their own end if less)."""

    rows: tuple[int, ...]
    start: int
    frames: int


def plan(lengths: Sequence[int], *, step_cost_frames: int, max_step_frames: int) -> list[Step]:
    """Steps that cover every row's ``lengths[row]`` frames (0: none), in order of ``start`` for each row.

    step_cost_frames: what a forward costs beyond its frames, in frames; max_step_frames: most rows x frames of one.
    """
    borders = [0, *sorted(set(lengths) - {0})]
    rows_beyond = [tuple(row for row, length in enumerate(lengths) if length > border) for border in borders]

    def cost(i: int, j: int) -> int:
        rows, frames = len(rows_beyond[i]), borders[j] - borders[i]
        return rows * frames + step_cost_frames * _steps_within(rows, frames, max_step_frames)

    best, came_from = [0], [0]  # cheapest way to bring all rows to border j, or to their end before it
    for j in range(1, len(borders)):
        total, previous = min((best[i] + cost(i, j), i) for i in range(j))
        best.append(total)
        came_from.append(previous)

    path = [len(borders) - 1]
    while path[-1] > 0:
        path.append(came_from[path[-1]])
    path.reverse()
    return [
        step
        for i, j in itertools.pairwise(path)
        for step in _cut(rows_beyond[i], lengths, borders[i], borders[j], max_step_frames)
    ]


def _steps_within(rows: int, frames: int, max_step_frames: int) -> int:
    rows_per_step = min(rows, max_step_frames)
    return math.ceil(rows / rows_per_step) * math.ceil(frames / (max_step_frames // rows_per_step))


def _cut(rows: tuple[int, ...], lengths: Sequence[int], start: int, end: int, max_step_frames: int) -> Iterator[Step]:
    """Evenly, so that the steps have the same shape where they can."""
    rows_per_step = min(len(rows), max_step_frames)
    pieces = math.ceil((end - start) / (max_step_frames // rows_per_step))
    frames = math.ceil((end - start) / pieces)
    for first in range(0, len(rows), rows_per_step):
        for at in range(start, end, frames):
            unfinished = tuple(row for row in rows[first : first + rows_per_step] if lengths[row] > at)
            if unfinished:
                yield Step(unfinished, at, min(frames, end - at))
