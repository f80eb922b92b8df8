"""What the processes of a measurement are told, and what they tell: without torch, because the parent needs none."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from typing import Any

from triton_omni.model_config import ModelConfig

# When a step or a call began and ended, in seconds of a clock that all processes of the machine share.
Spans = list[tuple[float, float]]
# A process that waits for the talker looks so often whether anybody still waits for it.
_PARENT_CHECK_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What both engines are built for. ``weights``: "checkpoint", or "random" ones of its shapes; ``batches``: rows of
    a talker's step or a code2wav's call, which get the only graphs; ``context``: rows of a talker's slot in the middle
    of its ``frames`` frames; ``chunk_frames``: of each row of a call.
    """

    model: ModelConfig
    device: str
    weights: str
    batches: tuple[int, ...]
    context: int
    frames: int
    chunk_frames: int


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """``sessions`` that speak in lockstep, code2wav taking ``rows`` of them a call, in turn. ``paced``: a call when the
    talker has made its frames, else one after the other; ``limit_s``: the talker stops then, wherever it stands.
    ``calls``: code2wav ends after so many by itself, None: when it is told to.
    """

    sessions: int
    rows: int
    paced: bool
    limit_s: float
    calls: int | None = None

    @property
    def pace(self) -> str:
        """Its name in the tables."""
        if not self.paced:
            return "unthrottled"
        return "paced" if self.rows == self.sessions else "spread"


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """``began_s`` to ``ended_s``: when the process was at work; ``spans``: of its steps or calls."""

    began_s: float
    ended_s: float
    spans: Spans

    def within(self, others: Sequence[Times]) -> Spans:
        """Those that lie where all of ``others`` were at work."""
        began_s = max(other.began_s for other in (self, *others))
        ended_s = min(other.ended_s for other in (self, *others))
        return [(begin, end) for begin, end in self.spans if began_s <= begin and end <= ended_s]


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Shared by the processes of a measurement. ``due``: a semaphore, one for each call that the talker has made the
    frames for; ``stopped``: an event, code2wav's end.
    """

    due: Any
    stopped: Any

    def reset(self) -> None:
        self.stopped.clear()
        while self.due.acquire(block=False):
            pass

    def stop(self) -> None:
        self.stopped.set()
        self.due.release()

    def calls(self, paced: bool) -> Iterator[int]:
        """The number of each call, when it is due."""
        number = 0
        while True:
            while paced and not self.due.acquire(timeout=_PARENT_CHECK_S):
                parent = multiprocessing.parent_process()
                if parent is not None and not parent.is_alive():
                    return
            if self.stopped.is_set():
                return
            yield number
            number += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """The moment at which everything has to have ended."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Limit:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at_s - time.monotonic())
