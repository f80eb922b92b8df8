"""A talker on the demo checkpoint, and a sink that tests can wait on."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from triton_omni.errors import OmniError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import CodesEvent, PromptRows, TalkerStart
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.factory import load_runner
from triton_omni.talker.runner import TalkerRunner

if TYPE_CHECKING:
    from tests.oracle import OracleAnswer  # it loads transformers

TIMEOUT_S = 240
CHUNKS = (4, 8, 16, 25)
GREEDY = TalkerSampling(temperature=0.0, max_frames=12)


class Listener:
    """A sink. ``result`` waits for the end and gives (all codes, finish_reason), or raises the session's error."""

    def __init__(self) -> None:
        self.events: list[CodesEvent] = []
        self._queue: queue.Queue[CodesEvent | OmniError] = queue.Queue()

    def __call__(self, event: CodesEvent | OmniError) -> None:
        self._queue.put(event)

    def next(self) -> CodesEvent:
        event = self._queue.get(timeout=TIMEOUT_S)
        if isinstance(event, OmniError):
            raise event
        self.events.append(event)
        return event

    def result(self) -> tuple[np.ndarray, str]:
        while (event := self.next()).finish_reason is None:
            pass
        assert self._queue.empty(), "an event after the last one"
        return np.concatenate([e.codes for e in self.events]), event.finish_reason

    @property
    def is_silent(self) -> bool:
        return self._queue.empty()


EngineMaker = Callable[..., LocalTalkerEngine]


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.load(checkpoint)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_runner(model_config: ModelConfig) -> Callable[..., TalkerRunner]:
    def make(**options: int) -> TalkerRunner:
        return load_runner(model_config, TalkerConfig(**{"max_sessions": 8, "max_context": 1024, **options}))

    return make


@pytest.fixture
def make_engine(model_config: ModelConfig) -> Iterator[EngineMaker]:
    engines = []

    def make(
        runner: TalkerRunner | None = None, now_s: Callable[[], float] = time.monotonic, **options: int
    ) -> LocalTalkerEngine:
        config = TalkerConfig(**{"max_sessions": 8, "max_context": 1024, **options})
        engines.append(LocalTalkerEngine(runner or load_runner(model_config, config), config, now_s=now_s))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def prompt(model_config: ModelConfig) -> Callable[..., np.ndarray]:
    """Prompt ids of (role, text ids) turns, with an assistant's head behind them."""
    raw = model_config.raw
    roles = {"user": raw["user_token_id"], "assistant": raw["assistant_token_id"], "system": raw["system_token_id"]}

    def ids(*turns: tuple[str, list[int]]) -> np.ndarray:
        found: list[int] = []
        for role, text in turns:
            found += [raw["im_start_token_id"], roles[role], 10, *text, raw["im_end_token_id"], 10]
        return np.array([*found, raw["im_start_token_id"], roles["assistant"], 10], np.int32)

    return ids


@pytest.fixture
def hello(prompt: Callable[..., np.ndarray], model_config: ModelConfig) -> Callable[..., TalkerStart]:
    """A start whose prompt is a short user message; ``token_ids`` is its answer, complete unless told otherwise."""

    def start(token_ids: list[int] = [5, 6, 7], **fields: object) -> TalkerStart:  # noqa: B006
        given = {
            "prompt_token_ids": prompt(("system", [11]), ("user", [12, 13, 14])),
            "speaker": model_config.default_speaker,
            "sampling": GREEDY,
            "chunk_frames": CHUNKS,
            "token_ids": np.array(token_ids, np.int32),
            "text_finished": True,
        }
        return TalkerStart(**{**given, **fields})

    return start


def speak(engine: LocalTalkerEngine, start: TalkerStart, session_id: str = "session") -> tuple[np.ndarray, str]:
    """One session from start to end: (codes [F, groups], finish_reason)."""
    listener = Listener()
    engine.start(session_id, start, listener)
    return listener.result()


def start_of(answer: OracleAnswer, speaker: str = "ethan", **sampling: object) -> TalkerStart:
    """The start that the pipeline makes of what the thinker answered."""
    rows = np.frombuffer(answer.rows.tobytes(), np.uint8)
    return TalkerStart(
        prompt_token_ids=answer.prompt_token_ids,
        speaker=speaker,
        sampling=TalkerSampling(**{"temperature": 0.0, **sampling}),
        chunk_frames=CHUNKS,
        prompt_rows=PromptRows(answer.positions, rows, "float32") if len(answer.rows) else None,
        token_ids=answer.token_ids,
        text_finished=True,
    )
