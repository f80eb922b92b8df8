"""Requests shrink with the time that is left, to two waves and no less."""

from __future__ import annotations

import time

import pytest

from triton_omni.sweep.budget import Budget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("left_s", "wave_s", "points", "requests"),
    [
        (None, 5.0, 1, 160),
        (1000.0, 5.0, 4, 160),  # 250 s each: ten waves fit
        (100.0, 5.0, 4, 80),  # 25 s each: five waves
        (100.0, 5.0, 20, 32),  # a share of 5 s: two waves all the same, while they fit into all that is left
        (9.0, 5.0, 1, 0),
    ],
)
def test_requests(clock: list[float], left_s: float | None, wave_s: float, points: int, requests: int) -> None:
    assert Budget(left_s).requests(16, wave_s, points) == requests


def test_time_passes(clock: list[float]) -> None:
    budget = Budget(60.0)
    clock[0] += 50
    assert budget.left_s() == 10 and budget.requests(4, 2.0, 1) == 20


def test_a_wave_is_expected_from_what_is_near(clock: list[float]) -> None:
    budget = Budget(60.0)
    assert budget.expected_wave_s("batch", 16) == 0
    budget.took("no_batch", 16, 9.0)
    budget.took("no_batch", 64, 40.0)
    budget.took("batch", 1, 2.0)
    assert budget.expected_wave_s("batch", 16) == 9  # as long as the row before at this level
    assert budget.expected_wave_s("batch", 32) == 2  # nothing but this row's own, at less
