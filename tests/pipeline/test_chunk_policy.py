from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import pytest

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.chunk_policy import RESERVE_S, ChunkBorders, ChunkPlan

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


class Speech:
    """A simulated talker and player. ``step_s`` of a frame's number: how long the talker works on it; a chunk takes
    ``way_s`` of its number longer from the talker to the player than the first one did."""

    def __init__(
        self,
        plan: ChunkPlan,
        step_s: Callable[[int], float],
        frames: int = 400,
        way_s: Callable[[int], float] = lambda chunk: 0.0,
    ) -> None:
        self.now_s = 100.0
        borders = ChunkBorders(plan.frames, plan.policy, lambda: self.now_s)
        self.chunks: list[int] = []
        self.stalls, collected, runs_dry_s = 0, 0, float("inf")
        for frame in range(frames):
            self.now_s += step_s(frame)
            collected += 1
            if not borders.is_complete(collected):
                continue
            borders.leave(collected)
            arrives_s = self.now_s + way_s(len(self.chunks))
            late = arrives_s > runs_dry_s + 1e-9
            self.stalls += late
            begins_s = arrives_s if late or not self.chunks else runs_dry_s
            runs_dry_s = begins_s + collected * FRAME_S
            self.chunks.append(collected)
            collected = 0


@pytest.mark.parametrize("frames", PLANS)
@pytest.mark.parametrize("share", [0.05, 0.4, 3.0])
def test_borders_of_a_fixed_plan_are_the_plans(frames: tuple[int, ...], share: float) -> None:
    plan = ChunkPlan(frames)
    chunks = Speech(plan, lambda _: share * FRAME_S).chunks
    assert chunks == list(islice(plan.sizes(), len(chunks)))


@pytest.mark.parametrize("frames", [(4, 8, 16, 25), (4, 25), (10, 20, 50)])
def test_an_adaptive_plan_of_a_fast_talker_is_the_plan(frames: tuple[int, ...]) -> None:
    chunks = Speech(ChunkPlan(frames, "adaptive"), lambda _: 0.05 * FRAME_S).chunks
    assert chunks == list(islice(ChunkPlan(frames).sizes(), len(chunks)))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_adaptive_chunks_never_stall_while_the_talker_keeps_up(share: float) -> None:
    """Where the same sizes, fixed, stall from 0.16 on."""
    adaptive = Speech(ChunkPlan((4, 25), "adaptive"), lambda _: share * FRAME_S)
    fixed = Speech(ChunkPlan((4, 25)), lambda _: share * FRAME_S)
    assert adaptive.stalls == 0
    assert fixed.stalls == (share > 0.16)
    assert min(adaptive.chunks) >= 4
    assert share > 0.9 or max(adaptive.chunks) == 25


def test_adaptive_chunks_grow_as_the_lead_does() -> None:
    chunks = Speech(ChunkPlan((4, 25), "adaptive"), lambda _: 0.5 * FRAME_S).chunks
    growing = chunks[: chunks.index(25) + 1]
    assert growing == sorted(growing) and len(growing) > 3


@pytest.mark.parametrize("seed", range(20))
def test_adaptive_chunks_bear_a_way_that_takes_as_much_longer_as_the_reserve(seed: int) -> None:
    chance = random.Random(seed)
    way = [0.0, *(chance.uniform(0, 0.9 * RESERVE_S) for _ in range(400))]
    speech = Speech(ChunkPlan((4, 25), "adaptive"), lambda _: 0.4 * FRAME_S, way_s=lambda chunk: way[chunk])
    assert speech.stalls == 0


def test_a_talker_that_pauses_stalls_once_and_goes_on_with_growing_chunks() -> None:
    """Without a new start of the clock every later chunk would be as small as it may be."""
    pause = {60: 5.0}
    speech = Speech(ChunkPlan((4, 25), "adaptive"), lambda frame: pause.get(frame, 0.2 * FRAME_S))
    assert speech.stalls == 1
    assert speech.chunks[-2] == 25


def test_a_talker_slower_than_speech_still_sends_whole_chunks() -> None:
    """Smaller ones would only slow it down further."""
    assert set(Speech(ChunkPlan((4, 25), "adaptive"), lambda _: 2 * FRAME_S).chunks) == {4}


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_a_speech_is_ahead_while_its_next_chunk_comes_in_time_at_the_last_frames_pace(policy: str) -> None:
    now_s = 100.0
    borders = ChunkBorders((4, 8), policy, lambda: now_s)
    assert borders.is_ahead(0)  # nobody plays yet
    for frame in range(1, 5):
        now_s += 1.0
        assert borders.is_ahead(frame - 1)
        assert borders.is_complete(frame) == (frame == 4)
    borders.leave(4)
    assert not borders.is_ahead(0)  # frames of a second each come late
    now_s += 0.02
    assert not borders.is_complete(1) and borders.is_ahead(1)
    now_s += 0.02
    assert not borders.is_complete(2) and borders.is_ahead(2)  # 0.28 s to play
    now_s += 0.15
    assert not borders.is_ahead(2)  # 0.13 s, and the player is to keep 0.1


def test_a_policy_that_is_not_known() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChunkPlan(policy="greedy")
    assert caught.value.field == "chunk_policy" and "fixed or adaptive" in caught.value.message
