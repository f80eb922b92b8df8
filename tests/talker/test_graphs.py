"""The graphed runner on a GPU: it says what the plain one says, in any bucket, slot and order of arrival."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.talker.conftest import GREEDY, Listener, speak
from tests.talker.test_batch import together
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import PromptRows, TalkerStart
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.factory import load_runner
from triton_omni.talker.runner import Runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),  # kernels compile
]
FRAMES, SESSIONS = 24, 24

if torch.cuda.is_available():
    from triton_omni.talker.fused import TILES

Start = Callable[..., TalkerStart]
Load = Callable[..., Runner]


@pytest.fixture(scope="module")
def load(model_config: ModelConfig) -> Load:
    """Runners, kept for the module: every one captures its graphs once."""
    kept: dict[tuple[tuple[str, object], ...], Runner] = {}

    def load(**options: object) -> Runner:
        key = tuple(sorted(options.items()))
        if key not in kept:
            kept[key] = load_runner(model_config, config_of(**options))
        return kept[key]

    return load


def config_of(**options: object) -> TalkerConfig:
    base = {"max_sessions": 64, "buckets": (1, 8, 64), "max_context": 512, "device": "cuda", "prefill_chunk": 64}
    return TalkerConfig(**{**base, **options})


@pytest.fixture
def serve(load: Load) -> Iterator[Callable[..., LocalTalkerEngine]]:
    engines = []

    def serve(async_output: bool | None = None, sessions: int = 64, **options: object) -> LocalTalkerEngine:
        config = config_of(**options)
        engine = LocalTalkerEngine(
            load(**options), dataclasses.replace(config, async_output=async_output, max_sessions=sessions)
        )
        engines.append(engine)
        return engine

    yield serve
    for engine in engines:
        engine.close()


Serve = Callable[..., LocalTalkerEngine]


@pytest.fixture
def starts(hello: Start, prompt: Callable[..., np.ndarray], model_config: ModelConfig) -> list[TalkerStart]:
    """Different sessions: prompts of 1 to 150 tokens, half of them greedy, some with media, lengths of their own."""
    random, voices = np.random.default_rng(0), list(model_config.speakers)
    pad = model_config.thinker["image_token_id"]
    width = model_config.talker["thinker_hidden_size"]
    found = []
    for i in range(SESSIONS):
        sampled = TalkerSampling(top_k=(50, 0, 5)[i % 3], top_p=(1.0, 0.8)[i % 2], seed=i * 7)
        frames = 8 + int(random.integers(0, FRAMES))
        text = random.integers(0, 250, int(random.integers(1, 150))).tolist()
        media = 5 if i % 4 == 1 else 0
        ids = prompt(("user", [*text, *[pad] * media]))
        rows = random.normal(size=(media, width)).astype(np.float32)
        positions = np.sort(random.integers(0, 100, (3, len(ids))).astype(np.int32), axis=1)
        positions[:, 0] = 0  # a segment begins with text, whose three positions are one
        found.append(
            hello(
                random.integers(0, 250, 3 + i).tolist(),
                prompt_token_ids=ids,
                prompt_rows=PromptRows(positions, rows.view(np.uint8).ravel(), "float32") if media else None,
                speaker=voices[i % len(voices)],
                sampling=dataclasses.replace(GREEDY if i % 2 else sampled, max_frames=frames, min_frames=frames),
            )
        )
    return found


def all_equal(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_graph_says_what_its_launches_say(
    serve: Serve, load: Load, starts: list[TalkerStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = together(serve(), starts, list(range(SESSIONS)))
    runner: Any = load()
    monkeypatch.setattr(runner, "replay", lambda bucket: runner.fused.step(bucket, TILES))
    all_equal(together(serve(), starts, list(range(SESSIONS))), graphed)


def test_graphs_say_what_plain_pytorch_says(serve: Serve, starts: list[TalkerStart]) -> None:
    """float32, greedy, prompts with and without media. Where two codes are as good as equal, rounding picks one of
    them, and the rest of that session is another; that happens to few.
    """
    greedy = [replace_sampling(start, temperature=0.0) for start in starts]
    order = list(range(SESSIONS))
    plain = together(serve(dtype="float32", cuda_graph=False), greedy, order)
    graphed = together(serve(dtype="float32"), greedy, order)
    all_equal([codes[:1] for codes in graphed], [codes[:1] for codes in plain])
    same = [np.array_equal(mine, other) for mine, other in zip(graphed, plain, strict=True)]
    assert sum(same) >= 0.75 * SESSIONS, same


def replace_sampling(start: TalkerStart, **fields: Any) -> TalkerStart:
    return dataclasses.replace(start, sampling=dataclasses.replace(start.sampling, **fields))


def test_no_bucket_slot_or_neighbour_changes_a_row(serve: Serve, starts: list[TalkerStart]) -> None:
    """bfloat16: alone (bucket 1), a few at a time (bucket 8), all at once (bucket 64), one step late or not."""
    alone = [speak(serve(sessions=1), start)[0] for start in starts[:6]]
    order = list(range(SESSIONS))
    whole = together(serve(), starts, order)
    all_equal(whole[:6], alone)
    all_equal(together(serve(sessions=5), starts, order[::-1]), whole)
    all_equal(together(serve(async_output=False), starts, np.random.default_rng(1).permutation(order).tolist()), whole)


def test_a_seed_is_a_voice_take_whatever_the_bucket(serve: Serve, hello: Start) -> None:
    sampling = TalkerSampling(max_frames=12, min_frames=12, seed=11)
    start = hello(sampling=sampling)
    alone = speak(serve(sessions=1), start)[0]
    other = speak(serve(sessions=1), hello(sampling=dataclasses.replace(sampling, seed=12)))[0]
    assert not np.array_equal(alone, other)
    for codes in together(serve(), [start] * 40, list(range(40))):
        np.testing.assert_array_equal(codes, alone)


def test_a_slot_used_1000_times_keeps_no_trace(serve: Serve, load: Load, starts: list[TalkerStart]) -> None:
    """Two slots, a thousand short sessions of every kind, and stale keys that would spoil whatever read them."""
    engine = serve(sessions=2)
    fresh = [speak(engine, start)[0] for start in starts]
    listeners = []
    for i in range(1000):
        listeners.append(Listener())
        cut = replace_sampling(starts[i % SESSIONS], max_frames=1 + i % 3, min_frames=1)
        engine.start(f"s{i}", cut, listeners[-1])
        if i % 7 == 0:
            engine.cancel(f"s{i}")
    for i, listener in enumerate(listeners):
        codes, reason = listener.result()
        assert reason == "cancelled" or np.array_equal(codes, fresh[i % SESSIONS][: len(codes)])
    runner = load()
    torch.cuda.synchronize()
    runner.slots.kv.fill_(float("nan"))  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    all_equal([speak(engine, start)[0] for start in starts], fresh)
    assert engine.stats() == {"running": 0, "waiting": 0, "waiting_for_text": 0, "slots_free": 2}


def test_sessions_that_come_and_go_at_random(serve: Serve, starts: list[TalkerStart]) -> None:
    """Text in pieces, cancels in between: those who stay say what they say alone."""
    expected = together(serve(), starts, list(range(SESSIONS)))
    random, engine = np.random.default_rng(3), serve()
    listeners = {i: Listener() for i in range(SESSIONS)}
    left = {i: start.token_ids for i, start in enumerate(starts)}
    waiting, opened = list(random.permutation(SESSIONS)), []
    for turn in range(10_000):
        if waiting and random.random() < 0.2:
            i = int(waiting.pop())
            opened.append(i)
            bare = dataclasses.replace(starts[i], token_ids=np.empty(0, np.int32), text_finished=False)
            engine.start(str(i), bare, listeners[i])
            ghost = f"ghost {turn}"
            engine.start(ghost, starts[i], lambda event: None)
            if random.random() < 0.5:
                engine.cancel(ghost)
        if opened:
            i = int(random.choice(opened))
            size = int(random.integers(0, 6))
            piece, left[i] = left[i][:size], left[i][size:]
            engine.append(str(i), piece, len(left[i]) == 0)
            if not len(left[i]):
                opened.remove(i)
        if not waiting and not opened:
            break
    all_equal([listeners[i].result()[0] for i in range(SESSIONS)], expected)
