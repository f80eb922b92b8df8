"""A session's codes are its own: batch mates, order of arrival, pieces of text, slots and their past change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests.talker.conftest import CHUNKS, GREEDY, EngineMaker, Listener, speak
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import TalkerStart
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.runner import TalkerRunner

FRAMES = 10
Start = Callable[..., TalkerStart]


@pytest.fixture
def starts(hello: Start, prompt: Callable[..., np.ndarray], model_config: ModelConfig) -> list[TalkerStart]:
    """Eight different sessions: prompts of 10 to 80 tokens, all voices, greedy and sampled."""
    random, voices = np.random.default_rng(0), list(model_config.speakers)
    found = []
    for i in range(8):
        sampled = TalkerSampling(top_k=(50, 0, 5)[i % 3], top_p=(1.0, 0.8)[i % 2], seed=i * 7)
        sampling = dataclasses.replace(GREEDY if i % 2 else sampled, max_frames=FRAMES + i, min_frames=FRAMES + i)
        text = random.integers(0, 256, 10 * (i + 1)).tolist()
        found.append(
            hello(
                random.integers(0, 256, 3 + i).tolist(),
                prompt_token_ids=prompt(("user", text)),
                speaker=voices[i % len(voices)],
                sampling=sampling,
            )
        )
    return found


def together(engine: LocalTalkerEngine, starts: list[TalkerStart], order: list[int]) -> list[np.ndarray]:
    listeners = [Listener() for _ in starts]
    for i in order:
        engine.start(str(i), starts[i], listeners[i])
    return [listener.result()[0] for listener in listeners]


def in_pieces(engine: LocalTalkerEngine, starts: list[TalkerStart], seed: int) -> list[np.ndarray]:
    """All sessions at once, their text cut at random and dealt out in random turns."""
    random = np.random.default_rng(seed)
    listeners, left = [Listener() for _ in starts], [start.token_ids for start in starts]
    for i, start in enumerate(starts):
        bare = dataclasses.replace(start, token_ids=np.empty(0, np.int32), text_finished=False)
        engine.start(str(i), bare, listeners[i])
    open_ids = list(range(len(starts)))
    while open_ids:
        i = int(random.choice(open_ids))
        size = int(random.integers(0, 4))
        piece, left[i] = left[i][:size], left[i][size:]
        engine.append(str(i), piece, len(left[i]) == 0)
        if len(left[i]) == 0:
            open_ids.remove(i)
    return [listener.result()[0] for listener in listeners]


def test_batch_mates_change_nothing(make_engine: EngineMaker, starts: list[TalkerStart]) -> None:
    engine = make_engine()
    alone = [speak(engine, start)[0] for start in starts]
    assert len({codes.tobytes() for codes in alone}) == len(starts)
    assert [len(codes) for codes in alone] == [FRAMES + i for i in range(8)]
    for got in (
        together(engine, starts, list(range(8))),
        together(engine, starts, list(reversed(range(8)))),
        together(make_engine(max_sessions=3), starts, [3, 1, 7, 0, 2, 6, 4, 5]),
        in_pieces(engine, starts, seed=0),
        in_pieces(make_engine(max_sessions=12, prefill_chunk=16), starts, seed=1),
        in_pieces(make_engine(max_sessions=3), starts, seed=2),
        in_pieces(make_engine(max_sessions=1, prefill_chunk=16, prefill_chunks_per_step=1), starts, seed=3),
        together(make_engine(prefill_chunk=16, prefill_chunks_per_step=1), starts, list(range(8))),
    ):
        for mine, expected in zip(got, alone, strict=True):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_session_that_gave_its_slot_back_says_the_same(
    make_engine: EngineMaker, starts: list[TalkerStart], eventually: Callable[..., None], sampled: bool
) -> None:
    engine, early, late = make_engine(max_sessions=1), starts[6 if sampled else 7], starts[4]
    alone = [speak(engine, start)[0] for start in (early, late)]
    listener, text = Listener(), early.token_ids
    engine.start("early", dataclasses.replace(early, token_ids=text[:0], text_finished=False), listener)
    eventually(lambda: engine.stats()["slots_free"])
    np.testing.assert_array_equal(speak(engine, late)[0], alone[1])
    engine.append("early", text, True)
    np.testing.assert_array_equal(listener.result()[0], alone[0])


def test_a_seed_gives_the_same_speech_and_another_seed_another(make_engine: EngineMaker, hello: Start) -> None:
    engine = make_engine()
    sampled = TalkerSampling(max_frames=6, min_frames=6, seed=1)
    codes = [
        speak(engine, hello(sampling=dataclasses.replace(sampled, seed=seed)))[0] for seed in (1, 1, 2, None, None)
    ]
    assert np.array_equal(codes[0], codes[1])
    assert len({c.tobytes() for c in codes}) == 4


def test_a_slot_keeps_no_trace_of_its_last_session(
    make_engine: EngineMaker, make_runner: Callable[..., TalkerRunner], starts: list[TalkerStart]
) -> None:
    fresh = speak(make_engine(max_sessions=1), starts[2])[0]
    runner = make_runner(max_sessions=1)
    engine = make_engine(runner, max_sessions=1)
    speak(engine, starts[7])
    runner.slots.kv.fill_(float("nan"))
    np.testing.assert_array_equal(speak(engine, starts[2])[0], fresh)


def test_min_frames_hold_eos_back(
    make_runner: Callable[..., TalkerRunner], make_engine: EngineMaker, hello: Start
) -> None:
    """With EOS far above all other codes, speech is as long as min_frames says: 0 included."""
    runner = make_runner()
    eos = runner.talker.shape.codec.eos

    def with_eos(module: object, args: object, logits: object) -> None:
        logits[..., eos] = 1e4  # type: ignore[index]

    runner.talker.codec_head.register_forward_hook(with_eos)
    engine = make_engine(runner)
    for base in (GREEDY, TalkerSampling(max_frames=12, seed=0)):
        for frames in (0, 1, 5):
            sampling = dataclasses.replace(base, min_frames=frames)
            codes, reason = speak(engine, hello(sampling=sampling, chunk_frames=CHUNKS))
            assert (len(codes), reason) == (frames, "stop")


def test_repetition_penalty_counts_layer_0_codes_also_when_greedy(make_engine: EngineMaker, hello: Start) -> None:
    engine = make_engine()
    free, rewarded = (
        speak(engine, hello(sampling=dataclasses.replace(GREEDY, min_frames=12, repetition_penalty=p)))[0][:, 0]
        for p in (1.0, 0.1)
    )
    assert free[0] == rewarded[0]
    assert len(set(rewarded.tolist())) < len(set(free.tolist()))
