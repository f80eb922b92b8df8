from __future__ import annotations

from itertools import islice

import pytest

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.chunk_policy import ChunkPlan

FRAME_S = 0.08
PLANS = [(4, 8, 16, 25), (4, 25), (1,), (25,), (4, 6, 9, 13, 19, 25), (10, 2, 30, 5), (2, 40, 3)]


def stalls(plan: ChunkPlan, step_s: float, chunks: int = 40) -> int:
    """A player that starts with the first chunk: how often it runs dry."""
    borders = list(islice(plan.borders(), chunks))
    runs_dry_s, count, before = float("inf"), 0, 0
    for border in borders:
        arrives_s = border * step_s
        late = arrives_s > runs_dry_s + 1e-9
        count += late
        begins_s = arrives_s if late or runs_dry_s == float("inf") else runs_dry_s
        runs_dry_s = begins_s + (border - before) * FRAME_S
        before = border
    return count


def test_the_default_plan() -> None:
    plan = ChunkPlan()
    assert list(islice(plan.sizes(), 6)) == [4, 8, 16, 25, 25, 25]
    assert list(islice(plan.borders(), 6)) == [4, 12, 28, 53, 78, 103]


@pytest.mark.parametrize("frames", PLANS)
def test_next_border_is_the_first_border_beyond(frames: tuple[int, ...]) -> None:
    plan = ChunkPlan(frames)
    for done in range(200):
        assert plan.next_border(done) == next(border for border in plan.borders() if border > done)


@pytest.mark.parametrize("frames", PLANS)
@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 28, 149])
def test_chunks_of_a_speech(frames: tuple[int, ...], total: int) -> None:
    sizes = ChunkPlan(frames).chunks(total)
    assert sum(sizes) == total
    assert all(sizes)
    assert sizes[:-1] == list(islice(ChunkPlan(frames).sizes(), max(0, len(sizes) - 1)))


@pytest.mark.parametrize("frames", PLANS)
def test_the_player_never_runs_dry_up_to_the_limit_and_does_beyond(frames: tuple[int, ...]) -> None:
    plan = ChunkPlan(frames)
    limit = plan.real_time_factor_limit()
    for share in (0.01, 0.3, 0.7, 1.0):
        assert stalls(plan, share * limit * FRAME_S) == 0
    assert stalls(plan, 1.02 * limit * FRAME_S) > 0


@pytest.mark.parametrize(
    ("first", "frames"), [(1, (1, 2, 4, 8, 16, 25)), (4, (4, 8, 16, 25)), (10, (10, 20, 25)), (25, (25,)), (40, (40,))]
)
def test_a_plan_that_grows_from_its_first_chunk(first: int, frames: tuple[int, ...]) -> None:
    plan = ChunkPlan.growing_from(first)
    assert plan.frames == frames
    assert plan.real_time_factor_limit() >= 0.5


@pytest.mark.parametrize("first", [-1, 0, 301])
def test_a_first_chunk_out_of_range(first: int) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        ChunkPlan.growing_from(first)
    assert raised.value.field == "chunk_frames[0]"


def test_growing_chunks_bear_a_slower_talker_than_a_jump() -> None:
    assert ChunkPlan((4, 8, 16, 25)).real_time_factor_limit() == 0.5
    assert ChunkPlan((4, 25)).real_time_factor_limit() == pytest.approx(0.16)
    assert stalls(ChunkPlan((4, 8, 16, 25)), 0.4 * FRAME_S) == 0
    assert stalls(ChunkPlan((4, 25)), 0.4 * FRAME_S) == 1


@pytest.mark.parametrize(
    ("frames", "field"), [((), "chunk_frames"), ((4, 0), "chunk_frames[1]"), ((1,) * 65, "chunk_frames")]
)
def test_bad_plans(frames: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChunkPlan(frames)
    assert caught.value.field == field
