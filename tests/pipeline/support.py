"""What the tests here share: a checkpoint's facts without a checkpoint, stages that count, a caller that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from triton_omni.errors import OmniError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.events import CancelToken, OmniEvent
from triton_omni.pipeline.local import LocalCode2Wav, LocalTalker, LocalThinker
from triton_omni.pipeline.null import (
    NullCode2Wav,
    NullTalker,
    NullTalkerConfig,
    NullThinker,
    NullThinkerConfig,
)
from triton_omni.pipeline.pipeline import OmniPipeline, PipelineConfig
from triton_omni.pipeline.request import RequestParser
from triton_omni.pipeline.stages import TalkerStage, ThinkerStage

MODEL = ModelConfig(
    path=Path("checkpoint"),
    raw={"enable_audio_output": True, "talker_config": {"speaker_id": {"Chelsie": 1, "Ethan": 2}}},
    generation={"talker_max_new_tokens": 4096, "thinker_max_new_tokens": 1024},
)
LIMIT_S = 60.0  # for what takes milliseconds unless it hangs
ENDLESS = {"thinker": {"max_tokens": 10**6}, "talker": {"min_frames": 10**6, "max_frames": 10**6}}
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "media": 0}, {"type": "text", "text": "What is it?"}]}]


class Caller:
    """Collects the events of one request; every wait has a limit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[OmniEvent | OmniError] = []
        self.times_s: list[float] = []

    def __call__(self, event: OmniEvent | OmniError) -> None:
        with self._changed:
            self.events.append(event)
            self.times_s.append(time.monotonic())
            self._changed.notify_all()

    def wait_for(self, met: Callable[[Caller], bool], timeout_s: float = LIMIT_S) -> Caller:
        with self._changed:
            assert self._changed.wait_for(lambda: met(self), timeout_s), self.events[-3:]
        return self

    def wait(self, timeout_s: float = LIMIT_S) -> Caller:
        return self.wait_for(lambda c: c.is_over, timeout_s)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and is_terminal(self.events[-1])

    @property
    def deltas(self) -> list[OmniEvent]:
        return [e for e in self.events if isinstance(e, OmniEvent)]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.deltas)

    @property
    def audio(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int16), *(e.audio for e in self.deltas)])

    @property
    def info(self) -> Any:
        assert isinstance(self.events[-1], OmniEvent), self.events[-1]
        return self.events[-1].info

    @property
    def error(self) -> OmniError:
        assert isinstance(self.events[-1], OmniError), self.events[-1]
        return self.events[-1]


def is_terminal(event: OmniEvent | OmniError) -> bool:
    return isinstance(event, OmniError) or event.is_end


class Counted:
    """A stage that counts its messages: each call, and each event that comes back. ``before`` may raise or wait."""

    def __init__(self, stage: Any, before: Callable[[str], None] = lambda call: None) -> None:
        self._stage = stage
        self.before = before
        self.calls: list[tuple[Any, ...]] = []
        self.messages = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.values()))
            self.before(name)
            self.messages += 2
            result = getattr(self._stage, name)(*args, **kwargs)
            return self._counted(result) if isinstance(result, Iterator) else result

        return call

    def _counted(self, events: Iterator[Any]) -> Iterator[Any]:
        for event in events:
            self.messages += 1
            yield event

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class Hold:
    """For ``Counted.before``: calls of that name wait until ``go_on``."""

    def __init__(self, call: str) -> None:
        self._call = call
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, call: str) -> None:
        if call == self._call:
            self.entered.set()
            assert self.go_on.wait(2 * LIMIT_S)


class House:
    """Null engines, counted stages and the pipeline over them."""

    def __init__(
        self,
        thinker: NullThinkerConfig | None = None,
        talker: NullTalkerConfig | None = None,
        pipeline: PipelineConfig | None = None,
        thinker_stage: ThinkerStage | None = None,
        talker_stage: TalkerStage | None = None,
    ) -> None:
        self.engines = (
            NullThinker(thinker or NullThinkerConfig(token_ms=1, prefill_ms=1)),
            NullTalker(talker or NullTalkerConfig(frame_ms=0.2)),
            NullCode2Wav(),
        )
        self.thinker = Counted(thinker_stage or LocalThinker(self.engines[0]))
        self.talker = Counted(talker_stage or LocalTalker(self.engines[1]))
        self.code2wav = Counted(LocalCode2Wav(self.engines[2]))
        self.pipeline = OmniPipeline(self.thinker, self.talker, self.code2wav, pipeline)
        self.parser = RequestParser(MODEL)

    def submit(self, token: CancelToken | None = None, media: tuple[bytes, ...] = (), **request: Any) -> Caller:
        caller = Caller()
        values = {"messages": IMAGE if media else HELLO, "modalities": ["text", "audio"], **request}
        self.pipeline.submit(self.parser.check(values, media), caller, token)
        return caller

    def is_empty(self) -> bool:
        gauges = [engine.stats() for engine in self.engines] + [self.pipeline.stats()]
        names = ("running", "waiting", "unfetched_rows")
        return not any(gauge.get(name) for gauge in gauges for name in names)

    def wait_empty(self) -> None:
        """Everything is back: no request, session, slot or row is left anywhere."""
        self.wait_until(self.is_empty)

    def wait_until(self, met: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        limit_s = time.monotonic() + timeout_s
        while not met():
            assert time.monotonic() < limit_s, [self.pipeline.stats(), *(engine.stats() for engine in self.engines)]
            threading.Event().wait(0.002)

    def close(self) -> None:
        self.pipeline.close(LIMIT_S)
        for engine in self.engines:
            engine.close()
