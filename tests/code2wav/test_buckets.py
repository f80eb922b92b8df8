from __future__ import annotations

import numpy as np
import pytest

from triton_omni.code2wav.buckets import Bucket, BucketStep, Planner, buckets


def planner(step_ms: float = 1.0, frame_ms: float = 0.02, max_rows: int = 64, max_step_frames: int = 1600) -> Planner:
    return Planner({b: step_ms + frame_ms * b.size for b in buckets(max_rows, max_step_frames)})


def total_ms(plan: list[BucketStep]) -> float:
    return sum(1.0 + 0.02 * step.bucket.size for step in plan)


def test_buckets_stay_within_rows_and_frames():
    shapes = buckets(5, 100)
    assert {b.rows for b in shapes} == {1, 2, 4, 8}
    assert all(b.size <= 100 for b in shapes)
    assert Bucket(8, 12) in shapes
    assert Bucket(64, 25) in buckets(200, 1600)
    assert Bucket(64, 50) not in buckets(200, 1600)


def test_equal_chunks_share_one_step():
    assert planner().plan([4, 4, 4]) == [BucketStep(Bucket(4, 4), (0, 1, 2), 0)]


def test_a_first_chunk_is_not_padded_to_its_mates_and_goes_first():
    first, *others = planner().plan([25] * 20 + [4] * 2)
    assert first == BucketStep(Bucket(2, 4), (20, 21), 0)
    assert {row for step in others for row in step.rows} == set(range(20))
    assert all(step.bucket.frames == 25 for step in others)


def test_padding_where_it_is_cheaper_than_a_step():
    assert planner().plan([24, 25]) == [BucketStep(Bucket(2, 25), (0, 1), 0)]


def test_33_rows_are_not_filled_up_to_64_where_frames_cost_more_than_steps():
    assert [step.bucket.rows for step in planner(step_ms=0.1, frame_ms=1.0).plan([25] * 33)] == [32, 1]
    assert [step.bucket.rows for step in planner(step_ms=100.0).plan([25] * 33)] == [64]


def test_nothing_to_do():
    assert planner().plan([]) == []
    assert planner().plan([0, 0]) == []


def test_a_long_chunk_runs_in_the_longest_buckets():
    plan = planner().plan([1600])
    assert [step.bucket for step in plan] == [Bucket(1, 50)] * 32
    assert [step.start for step in plan] == list(range(0, 1600, 50))


@pytest.mark.parametrize("seed", range(30))
def test_every_frame_once_in_order(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 60, random.integers(1, 90)).tolist()
    done = [0] * len(lengths)
    plan = planner(frame_ms=float(random.choice([0.001, 0.02, 1.0])), max_step_frames=int(random.choice([50, 1600])))
    for step in plan.plan(lengths):
        assert 0 < len(step.rows) <= step.bucket.rows
        for row in step.rows:
            assert step.start == done[row] < lengths[row]
            done[row] = min(lengths[row], done[row] + step.bucket.frames)
    assert done == lengths


@pytest.mark.parametrize("lengths", [[4] * 3 + [25] * 5, [4, 8, 16, 25], [1, 2, 3], [16] * 8, [50, 4], [30, 31]])
def test_cheaper_than_each_row_alone_and_than_all_padded_together(lengths):
    planned = total_ms(planner().plan(lengths))
    alone = sum(total_ms(planner().plan([length])) for length in lengths)
    together = min(
        1.0 + 0.02 * b.size for b in buckets(64, 1600) if b.rows >= len(lengths) and b.frames >= max(lengths)
    )
    assert planned <= min(alone, together) + 1e-9
