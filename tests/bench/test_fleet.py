"""Load over several processes, against a target that answers by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from triton_omni.bench.fleet import Fleet
from triton_omni.bench.load import run, shares
from triton_omni.bench.record import Record
from triton_omni.errors import StageError

BODIES = [{"number": number} for number in range(12)]


class Counting:
    """Tells in ``prompt_tokens`` which request it was, in ``text_tokens`` how many were open with it."""

    def __init__(self) -> None:
        self.open = 0

    async def ask(self, body: Mapping[str, Any], late_s: float) -> Record:
        sent_s = time.monotonic()
        self.open += 1
        peak = self.open
        for _ in range(3):
            await asyncio.sleep(0)
        self.open -= 1
        return Record(sent_s, time.monotonic(), late_s, prompt_tokens=body["number"], text_tokens=peak)

    async def close(self) -> None:
        pass


class Dying(Counting):
    async def ask(self, body: Mapping[str, Any], late_s: float) -> Record:
        raise SystemExit(3)


def test_every_request_is_sent_once_and_levels_follow_each_other():
    with Fleet(Counting, 2) as fleet:
        for concurrency, each in ((1, {1}), (2, {1}), (6, {1, 2, 3})):
            records: list[Record] = []
            busiest = fleet.run(shares(BODIES, 2, concurrency, ()), records.append)
            assert sorted(record.prompt_tokens for record in records) == list(range(12))
            assert {record.text_tokens for record in records} == each
            assert busiest >= 0


@pytest.mark.asyncio
@pytest.mark.parametrize("due_s", [(), tuple(0.02 * number for number in range(12))])
async def test_nothing_is_sent_before_its_moment(due_s):
    records: list[Record] = []
    (share,) = shares(BODIES, 1, 3, due_s)
    start_s = time.monotonic() + 0.1
    await run(share, Counting(), start_s, records.append)
    records.sort(key=lambda record: record.prompt_tokens)
    for record, moment_s in zip(records, due_s or [0.0] * 12, strict=True):
        assert 0 <= record.late_s <= record.sent_s - start_s - moment_s + 1e-6


def test_a_client_process_that_dies_is_an_error():
    with Fleet(Dying, 2) as fleet, pytest.raises(StageError, match="process of the load client ended"):
        fleet.run(shares(BODIES, 2, 2, ()), lambda record: None)


def test_a_target_that_cannot_be_made_is_an_error():
    with pytest.raises(StageError, match="process of the load client ended"), Fleet(dict.__getitem__, 1):
        pass
