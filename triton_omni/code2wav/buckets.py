"""The shapes of step that exist as CUDA graphs, and which of them serve the chunks that wait.

Rows carry their state, so chunks may be cut anywhere and rows may advance separately. ``Planner`` puts rows of similar
length into groups; a group advances together, by bucket after bucket, rows that have reached their end drop out.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Mapping, Sequence

ROWS = (1, 2, 4, 8, 16, 32, 64)
FRAMES = (1, 2, 4, 8, 12, 25, 50)


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A shape of step: ``rows`` sessions, ``frames`` of each."""

    rows: int
    frames: int

    @property
    def size(self) -> int:
        return self.rows * self.frames


def buckets(max_rows: int, max_step_frames: int) -> list[Bucket]:
    """Every bucket of at most ``max_step_frames`` frames, rows as far as ``max_rows`` sessions need them."""
    rows = [r for r in ROWS if r < max_rows] + [min(r for r in ROWS if r >= min(max_rows, ROWS[-1]))]
    return [Bucket(r, f) for r in dict.fromkeys(rows) for f in FRAMES if r * f <= max_step_frames]


@dataclasses.dataclass(frozen=True, slots=True)
class BucketStep:
    """``rows`` advance together from their frame ``start`` by up to ``bucket.frames``, their own end if less."""

    bucket: Bucket
    rows: tuple[int, ...]
    start: int


class Planner:
    """The cheapest steps for chunks of given lengths. ``costs_ms``: what each bucket takes, as measured."""

    def __init__(self, costs_ms: Mapping[Bucket, float]) -> None:
        self._costs_ms = dict(costs_ms)
        self._frames = sorted({bucket.frames for bucket in costs_ms})
        by_rows = sorted(costs_ms, key=lambda bucket: bucket.rows)
        self._sized = {frames: [b for b in by_rows if b.frames == frames] for frames in self._frames}
        self._share = functools.lru_cache(maxsize=4096)(self._cheapest_share)
        self._course = functools.lru_cache(maxsize=4096)(self._cheapest_course)

    def plan(self, lengths: Sequence[int]) -> list[BucketStep]:
        """Steps that cover every row's ``lengths[row]`` frames (0: none). Short chunks, so first ones, go first."""
        order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: lengths[row])
        kinds = [self._kind(lengths[row]) for row in order]
        borders = [0, *(i for i in range(1, len(order)) if kinds[i] != kinds[i - 1]), len(order)]
        sizes = [lengths[row] for row in order]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for j in range(1, len(borders) if order else 0):
            costs = ((best[i][0] + self._course(tuple(sizes[borders[i] : borders[j]]))[0], i) for i in range(j))
            best.append(min(costs))
        groups = []
        j = len(best) - 1
        while j > 0:
            i = best[j][1]
            groups.append(order[borders[i] : borders[j]])
            j = i
        return [step for group in reversed(groups) for step in self._steps(group, lengths)]

    def _kind(self, length: int) -> tuple[int, int]:
        """Rows of one kind end within the same bucket; they are not worth groups of their own."""
        whole, rest = divmod(length - 1, self._frames[-1])
        return whole, bisect.bisect_left(self._frames, rest + 1)

    def _steps(self, group: Sequence[int], lengths: Sequence[int]) -> list[BucketStep]:
        steps = []
        start = 0
        for frames in self._course(tuple(lengths[row] for row in group))[1]:
            rows = [row for row in group if lengths[row] > start]
            for bucket in self._share(len(rows), frames)[1]:
                steps.append(BucketStep(bucket, tuple(rows[: bucket.rows]), start))
                rows = rows[bucket.rows :]
            start += frames
        return steps

    def _cheapest_course(self, lengths: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """Cost and frames of the steps by which rows of ``lengths``, ascending, advance to their ends together."""
        longest, widest = lengths[-1], self._frames[-1]
        whole = max(0, longest - 2 * widest) // widest  # of a long chunk's beginning, without a choice
        best: dict[int, tuple[float, tuple[int, ...]]] = {longest: (0.0, ())}
        reachable = [whole * widest]
        for start in reachable:
            reachable.extend({start + f for f in self._frames if start + f < longest}.difference(reachable))
        for start in sorted(reachable, reverse=True):
            rows = len(lengths) - bisect.bisect_right(lengths, start)
            best[start] = min(
                (self._share(rows, f)[0] + best[min(start + f, longest)][0], (f, *best[min(start + f, longest)][1]))
                for f in self._frames
            )
        cost, course = best[whole * widest] if longest else (0.0, ())
        for piece in range(whole):
            cost += self._share(len(lengths) - bisect.bisect_right(lengths, piece * widest), widest)[0]
        return cost, (widest,) * whole + course

    def _cheapest_share(self, rows: int, frames: int) -> tuple[float, tuple[Bucket, ...]]:
        """Cost and buckets that take ``rows`` rows by ``frames``, the larger buckets first."""
        sized = self._sized[frames]
        if rows > sized[-1].rows:
            cost, others = self._share(rows - sized[-1].rows, frames)
            return self._costs_ms[sized[-1]] + cost, (sized[-1], *others)
        whole = next(bucket for bucket in sized if bucket.rows >= rows)
        best: tuple[float, tuple[Bucket, ...]] = (self._costs_ms[whole], (whole,))
        for bucket in reversed(sized):
            if bucket.rows < rows:
                cost, others = self._share(rows - bucket.rows, frames)
                if cost + self._costs_ms[bucket] < best[0]:
                    best = (cost + self._costs_ms[bucket], (bucket, *others))
        return best
