from __future__ import annotations

import itertools

import numpy as np
import pytest

from triton_omni.code2wav.schedule import Step, plan


def steps(*lengths: int, step_cost_frames: int = 4, max_step_frames: int = 64) -> list[Step]:
    return plan(lengths, step_cost_frames=step_cost_frames, max_step_frames=max_step_frames)


def test_equal_chunks_share_one_step():
    assert steps(4, 4, 4) == [Step((0, 1, 2), 0, 4)]


def test_a_short_first_chunk_is_not_padded_to_its_mates():
    assert steps(25, 4, 12) == [Step((0, 1, 2), 0, 4), Step((0, 2), 4, 8), Step((0,), 12, 13)]


def test_padding_where_it_is_cheaper_than_a_step():
    assert steps(24, 25) == [Step((0, 1), 0, 25)]


def test_nothing_to_do():
    assert steps() == []
    assert steps(0, 0) == []
    assert steps(0, 3) == [Step((1,), 0, 3)]


def test_long_work_is_cut_evenly():
    assert steps(100, max_step_frames=64) == [Step((0,), 0, 50), Step((0,), 50, 50)]
    assert steps(*[4] * 5, max_step_frames=2) == [
        Step(rows, frame, 1) for rows in ((0, 1), (2, 3), (4,)) for frame in range(4)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_frame_once_in_order_and_within_bounds(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 60, random.integers(1, 20)).tolist()
    limit = int(random.integers(1, 100))
    done = [0] * len(lengths)
    for step in steps(*lengths, max_step_frames=limit):
        assert len(step.rows) * step.frames <= limit
        for row in step.rows:
            assert step.start == done[row]
            done[row] = min(lengths[row], done[row] + step.frames)
    assert done == lengths


@pytest.mark.parametrize("seed", range(5))
def test_no_other_staircase_is_cheaper(seed):
    lengths = np.random.default_rng(seed).integers(1, 30, 5).tolist()
    borders = sorted(set(lengths))

    def cost(stops: tuple[int, ...]) -> int:
        return sum(
            4 + (stop - start) * sum(length > start for length in lengths)
            for start, stop in itertools.pairwise((0, *stops))
        )

    others = [
        cost((*chosen, borders[-1])) for n in range(len(borders)) for chosen in itertools.combinations(borders[:-1], n)
    ]
    planned = steps(*lengths, max_step_frames=10_000)
    assert sum(4 + len(step.rows) * step.frames for step in planned) == min(others)
