"""A long answer's cost, quarter by quarter."""

from __future__ import annotations

import pytest

from triton_omni.sweep.long_form import rtf_by_quarter


def test_steady() -> None:
    assert rtf_by_quarter([(1.0 + 0.1 * i, 1.0) for i in range(101)]) == pytest.approx([0.1] * 4, rel=0.05)


def test_growing() -> None:
    now_s, pieces = 0.5, []
    for i in range(80):
        now_s += 0.01 * i
        pieces.append((now_s, 2.0))
    first, second, third, last = rtf_by_quarter(pieces)
    assert first < second < third < last and last == pytest.approx(0.005 * 69.5, rel=0.01)


def test_pieces_longer_than_a_quarter() -> None:
    """Of 8 s: 2 s in 0.5 s, 2 s in 0.5 s, and 4 s at once in 3 s."""
    assert rtf_by_quarter([(0.0, 1.0), (0.5, 1.0), (1.0, 2.0), (4.0, 4.0)]) == [0.25, 0.25, 0.0, 0.75]
