"""Requests against one target on one event loop: so many at a time, or at given moments."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from triton_omni.bench.record import Record

Done = Callable[[Record], None]


class Target(Protocol):
    """A server. ``late_s`` goes into the record."""

    async def ask(self, body: Mapping[str, Any], late_s: float) -> Record: ...
    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one event loop has to send: ``bodies``, ``concurrency`` of them at a time; or, with ``due_s``, each at its
    own moment, in seconds after the start.
    """

    bodies: Sequence[Mapping[str, Any]]
    concurrency: int = 1
    due_s: Sequence[float] = ()


async def run(share: Share, target: Target, start_s: float, done: Done) -> None:
    """From ``start_s`` (``time.monotonic()``) until the last answer has ended."""
    await asyncio.sleep(start_s - time.monotonic())
    if share.due_s:
        await _open_loop(share, target, start_s, done)
    else:
        await _closed_loop(share, target, done)


async def _closed_loop(share: Share, target: Target, done: Done) -> None:
    waiting = iter(share.bodies)

    async def stream() -> None:
        for body in waiting:
            done(await target.ask(body, 0.0))

    await asyncio.gather(*(stream() for _ in range(min(share.concurrency, len(share.bodies)))))


async def _open_loop(share: Share, target: Target, start_s: float, done: Done) -> None:
    async def send(body: Mapping[str, Any], late_s: float) -> None:
        done(await target.ask(body, late_s))

    async with asyncio.TaskGroup() as group:
        for body, due_s in zip(share.bodies, share.due_s, strict=True):
            await asyncio.sleep(start_s + due_s - time.monotonic())
            group.create_task(send(body, max(0.0, time.monotonic() - start_s - due_s)))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Moments of a Poisson process of ``rate`` a second, the first at 0, in seconds."""
    rng = random.Random(seed)
    return list(itertools.accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def shares(
    bodies: Sequence[Mapping[str, Any]], processes: int, concurrency: int, due_s: Sequence[float]
) -> list[Share]:
    """Spread evenly; never more processes than streams or requests."""
    count = max(1, min(processes, len(bodies), len(bodies) if due_s else concurrency))
    streams = [concurrency // count + (i < concurrency % count) for i in range(count)]
    return [Share(bodies[i::count], streams[i], due_s[i::count]) for i in range(count)]
