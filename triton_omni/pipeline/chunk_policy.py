"""When speech leaves the talker: the sizes of the chunks, and what keeps the player from running dry.

The player starts with the first chunk and plays 12.5 frames per second. A chunk leaves only when its last frame is
there, so while the talker works on chunk k the player lives on chunks 0..k-1. A small first chunk makes speech start
soon; a large second one after it ("4, then 25") stalls everybody once, because 4 frames last 0.3 s and 25 frames take
longer. Growing sizes earn the time for the next: with 4, 8, 16, 25, 25, … the talker may take half of real time.
Large chunks at the end keep the number of messages and vocoder calls low.

An adaptive plan's sizes are the most a chunk may have: it leaves earlier, with no fewer frames than the first chunk,
when the player would run dry. So "4, 25, adaptive" sends as few chunks as a fast talker allows, and stalls only when
the talker cannot keep up with real time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat

from triton_omni.errors import InvalidRequestError

FRAME_S = 0.08
DEFAULT_CHUNK_FRAMES = (4, 8, 16, 25)
MAX_CHUNK_FRAMES = 300
MAX_PLAN_LENGTH = 64
CHUNK_POLICIES = ("fixed", "adaptive")
# What a chunk may take from the talker to the player longer than the first one took: vocoder, network, a busy machine.
RESERVE_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPlan:
    """``frames``: sizes of the first chunks in codec frames; the last one repeats. ``policy``: "fixed", or "adaptive":
    chunks after the first have at most these sizes and leave before the player runs dry.

    Raises: InvalidRequestError naming ``chunk_frames`` or ``chunk_policy``.
    """

    frames: tuple[int, ...] = DEFAULT_CHUNK_FRAMES
    policy: str = CHUNK_POLICIES[0]

    def __post_init__(self) -> None:
        if self.policy not in CHUNK_POLICIES:
            raise InvalidRequestError("chunk_policy", f"must be fixed or adaptive, got {self.policy!r}")
        if not 1 <= len(self.frames) <= MAX_PLAN_LENGTH:
            raise InvalidRequestError(
                "chunk_frames", f"must hold 1 to {MAX_PLAN_LENGTH} sizes (the last repeats), got {len(self.frames)}"
            )
        for index, size in enumerate(self.frames):
            if not 1 <= size <= MAX_CHUNK_FRAMES:
                raise InvalidRequestError(
                    f"chunk_frames[{index}]", f"must lie in [1, {MAX_CHUNK_FRAMES}] frames, got {size}"
                )

    @classmethod
    def growing_from(cls, first_frames: int) -> ChunkPlan:
        """``first_frames``, then doubling up to the default's last size: the talker may always take half of real time.

        Raises: InvalidRequestError naming ``chunk_frames[0]``.
        """
        sizes = [first_frames]
        while 0 < sizes[-1] < DEFAULT_CHUNK_FRAMES[-1]:
            sizes.append(min(2 * sizes[-1], DEFAULT_CHUNK_FRAMES[-1]))
        return cls(tuple(sizes))

    def sizes(self) -> Iterator[int]:
        """Chunk sizes without end."""
        return chain(self.frames, repeat(self.frames[-1]))

    def borders(self) -> Iterator[int]:
        """Frame counts at which a chunk is complete, without end: 4, 12, 28, 53, 78, …"""
        border = 0
        for size in self.sizes():
            border += size
            yield border

    def next_border(self, frames: int) -> int:
        """The first border beyond ``frames``."""
        border = 0
        for size in self.frames:
            border += size
            if border > frames:
                return border
        last = self.frames[-1]
        return border + last * ((frames - border) // last + 1)

    def chunks(self, total_frames: int) -> list[int]:
        """Sizes of the chunks of a speech of ``total_frames``; the last one is what is left."""
        sizes: list[int] = []
        for size in self.sizes():
            if total_frames <= 0:
                return sizes
            sizes.append(min(size, total_frames))
            total_frames -= size
        raise AssertionError("sizes() has no end")

    def real_time_factor_limit(self) -> float:
        """The slowest steady production, as time per frame over a frame's duration, at which no chunk comes late.

        Chunk k is complete when the frames of chunks 1..k have been made since chunk 0 left, and is due when chunks
        0..k-1 have been played. From the first repetition on the quotient only grows.
        """
        first = self.frames[0]
        played, limit = first, 1.0
        for size in (*self.frames[1:], self.frames[-1]):
            limit = min(limit, played / (played + size - first))
            played += size
        return limit


class ChunkBorders:
    """Where the chunks of one speech end, said while it is made. Not thread-safe; ``now_s`` tells the time."""

    def __init__(self, sizes: tuple[int, ...], policy: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._sizes, self._adaptive, self._now_s = sizes, policy == "adaptive", now_s
        self._left = 0
        self._runs_dry_s = self._frame_s = float("-inf")
        self._frame_took_s = float("inf")

    def until_next(self, frames: int) -> int:
        """How many frames from now ``is_complete`` is to be asked, for a chunk that has ``frames``."""
        return 1 if self._adaptive else self._size() - frames

    def is_complete(self, frames: int) -> bool:
        """Whether the chunk leaves with the frame that has just been made, its number ``frames``."""
        now_s = self._now_s()
        self._frame_took_s, self._frame_s = now_s - self._frame_s, now_s
        size = self._size()
        if not self._adaptive or frames >= size:
            return frames >= size
        return frames >= self._sizes[0] and now_s + self._frame_took_s + RESERVE_S > self._runs_dry_s

    def is_ahead(self, frames: int) -> bool:
        """Whether a chunk that has ``frames`` may leave in time if its others take as long as the last one did.
        The first one always may: nobody plays yet.
        """
        needed = min(self._sizes[0], self._size()) if self._adaptive else self._size()
        complete_s = self._now_s() + max(1, needed - frames) * self._frame_took_s
        return self._left == 0 or complete_s + RESERVE_S < self._runs_dry_s

    def leave(self, frames: int) -> None:
        """A chunk of ``frames`` is on its way. The player's clock runs from the first; a stall sets it anew."""
        self._frame_s = self._now_s()
        self._runs_dry_s = max(self._runs_dry_s, self._frame_s) + frames * FRAME_S
        self._left += 1

    def _size(self) -> int:
        return self._sizes[min(self._left, len(self._sizes) - 1)]
