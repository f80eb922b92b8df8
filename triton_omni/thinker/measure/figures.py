"""What is asked of a thinker that is measured, and the figures of what came back."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from triton_omni.errors import ConfigError
from triton_omni.serve.processes import child_pids

Row = dict[str, Any]
Message = dict[str, str]
_SPREAD = 2_654_435_761  # Knuth's multiplier: numbers that follow each other land far apart


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests by number, the same for every system. Answers have ``fewest`` to ``most`` tokens, so that requests
    start and end at different times, as they do in service.
    """

    fewest: int
    most: int
    rounds: int

    @classmethod
    def of(cls, tokens: str, rounds: int) -> Self:
        """``tokens``: "128" or "40-200". Raises ConfigError."""
        fewest, _, most = tokens.partition("-")
        try:
            made = cls(int(fewest), int(most or fewest), rounds)
        except ValueError:
            raise ConfigError(f"must be a number or two, 40-200, got {tokens!r}", field="tokens") from None
        if not 1 <= made.fewest <= made.most:
            raise ConfigError(f"must be at least 1, and the second no smaller, got {tokens!r}", field="tokens")
        return made

    def requests(self, concurrency: int) -> int:
        """``rounds`` for each place, and no fewer than eight."""
        return max(self.rounds * concurrency, 8)

    def messages(self, number: int) -> list[Message]:
        return [{"role": "user", "content": f"Question {number}: tell me all you know of the number {number}."}]

    def tokens(self, number: int) -> int:
        return self.fewest + number * _SPREAD % 2**32 % (self.most - self.fewest + 1)

    @property
    def warm_up(self) -> Workload:
        """One short answer for each place."""
        return Workload(8, 8, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds until the first token, until the last, and how many there were."""

    first_s: float
    total_s: float
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds so far: of a process, all its threads, and of those that it has started."""

    process_s: float
    children_s: float

    def since(self, before: CpuTime) -> CpuTime:
        return CpuTime(self.process_s - before.process_s, self.children_s - before.children_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """A process and those below it, as they were found once: to look for them takes time of its own."""

    pid: int
    below: list[int]

    @classmethod
    def of(cls, pid: int) -> Self:
        to_ask, below = [pid], []
        while to_ask:
            found = child_pids(to_ask.pop())
            to_ask += found
            below += found
        return cls(pid, below)

    def cpu_time(self) -> CpuTime:
        return CpuTime(process_s(self.pid), sum(map(process_s, self.below)))


def process_s(pid: int) -> float:
    """CPU time of a process, all its threads, without its children; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """All requests of one concurrency."""

    concurrency: int
    wall_s: float
    cpu: CpuTime
    timings: list[Timing]

    def row(self, system: str) -> Row:
        """Medians of TTFT and of TPOT, the mean time of each token after a request's first. ``process``: what holds
        AsyncLLM; ``engine``: the processes that it has started.
        """
        requests, tokens = len(self.timings), sum(timing.tokens for timing in self.timings)
        tpot_s = [(timing.total_s - timing.first_s) / max(timing.tokens - 1, 1) for timing in self.timings]
        return {
            "system": system,
            "concurrency": self.concurrency,
            "requests": requests,
            "tokens_per_request": round(tokens / requests, 1),
            "tokens_per_s": round(tokens / self.wall_s, 1),
            "ttft_ms": round(1000 * statistics.median(timing.first_s for timing in self.timings), 2),
            "tpot_ms": round(1000 * statistics.median(tpot_s), 3),
            "process_us_per_token": round(1e6 * self.cpu.process_s / tokens, 1),
            "process_ms_per_request": round(1e3 * self.cpu.process_s / requests, 2),
            "engine_ms_per_request": round(1e3 * self.cpu.children_s / requests, 2),
        }


Report = Callable[[Run], None]
