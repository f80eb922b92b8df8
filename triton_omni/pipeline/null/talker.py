"""A talker without a model."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np

from triton_omni.errors import InvalidRequestError, OmniError, StageError
from triton_omni.pipeline.chunk_policy import ChunkBorders, ChunkPlan
from triton_omni.pipeline.null.checks import at_least
from triton_omni.pipeline.stages import CodesEvent, FinishReason, Int32, TalkerSink, TalkerStart
from triton_omni.pipeline.timers import Timer, Timers


@dataclasses.dataclass(frozen=True, slots=True)
class NullTalkerConfig:
    """One frame every ``frame_ms`` while its text is there; a speech of ``frames_per_token`` frames per answer id;
    ``max_sessions`` speak at once, others wait, and who has no text yet gives its slot to one that has."""

    frame_ms: float = 5.0
    frames_per_token: float = 3.72
    max_sessions: int = 32
    code_groups: int = 16

    def __post_init__(self) -> None:
        at_least(self, frame_ms=0, frames_per_token=0.1, max_sessions=1, code_groups=1)


class _Speech:
    """What a session may say: frame t needs answer id t until the text has ended."""

    def __init__(self, session_id: str, start: TalkerStart, sink: TalkerSink, config: NullTalkerConfig) -> None:
        self.session_id = session_id
        self.sink = sink
        plan = ChunkPlan(start.chunk_frames, start.chunk_policy)
        self.borders = ChunkBorders(plan.frames, plan.policy)
        self.sampling = start.sampling
        self.frames_per_token = config.frames_per_token
        self.ids = 0
        self.text_finished = False
        self.done = self.sent = 0
        self.next_s = 0.0
        self.timer: Timer | None = None

    def hear(self, token_ids: Int32, text_finished: bool) -> None:
        self.ids += token_ids.size
        self.text_finished |= text_finished

    @property
    def has_begun(self) -> bool:
        """Whether any of its text is there, or will never be."""
        return self.ids > 0 or self.text_finished

    @property
    def available(self) -> int:
        """Frames that can be made with the text there is."""
        if self.text_finished and self.ids:
            natural = max(self.ids, self.sampling.min_frames, round(self.ids * self.frames_per_token))
        else:
            natural = self.ids
        return min(natural, self.sampling.max_frames)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while there is more to come."""
        if self.done < self.available:
            return None
        if self.done == self.sampling.max_frames:
            return "length"
        return "stop" if self.text_finished else None


class NullTalker:
    """TalkerEngine: CODES at the borders of the chunk plan, deterministic, paced, with slots and a waiting line."""

    def __init__(self, config: NullTalkerConfig | None = None) -> None:
        self._config = config or NullTalkerConfig()
        self._timers = Timers("null-talker")
        self._lock = threading.Lock()
        self._running: dict[str, _Speech] = {}
        self._waiting: dict[str, _Speech] = {}
        self._closed = False

    def start(self, session_id: str, start: TalkerStart, sink: TalkerSink) -> None:
        """Open a session, or have it wait for a slot. Errors go to the sink."""
        refusal: OmniError | None = None
        try:
            speech = _Speech(session_id, start, sink, self._config)
        except InvalidRequestError as error:
            sink(error)
            return
        speech.hear(start.token_ids, start.text_finished)
        with self._lock:
            if self._closed:
                refusal = StageError("talker", "the engine is closed")
            elif session_id in self._running or session_id in self._waiting:
                refusal = InvalidRequestError("session_id", f"{session_id!r} is already open")
            else:
                self._waiting[session_id] = speech
                self._admit()
        if refusal is not None:
            sink(refusal)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        """More of the answer; a session that has ended is left alone."""
        with self._lock:
            if speech := self._waiting.get(session_id):
                speech.hear(token_ids, text_finished)
                self._admit()
            elif speech := self._running.get(session_id):
                speech.hear(token_ids, text_finished)
                self._wait(speech)

    def cancel(self, session_id: str) -> None:
        """End a session with "cancelled", also one that waits; unknown ones are left alone."""
        self._end(session_id, CodesEvent(self._codes(0, 0), "cancelled"))

    def stats(self) -> dict[str, int]:
        """As the talker's: ``running`` sessions hold a slot, ``waiting`` ones have text but none; ``waiting_for_text``;
        ``slots_free``.
        """
        with self._lock:
            begun = sum(speech.has_begun for speech in self._waiting.values())
            without_next = sum(speech.timer is None for speech in self._running.values())
            return {
                "running": len(self._running),
                "waiting": begun,
                "waiting_for_text": without_next + len(self._waiting) - begun,
                "slots_free": self._config.max_sessions - len(self._running),
            }

    def close(self) -> None:
        """End every session with an error."""
        with self._lock:
            self._closed = True
            open_ids = [*self._waiting, *self._running]
        for session_id in open_ids:
            self._end(session_id, StageError("talker", "the engine is closed"))
        self._timers.close()

    def _admit(self) -> None:
        """Give slots to those that wait, with text first, and to these also the slots of others that have none yet."""
        while self._waiting and not self._closed:
            speech = next((s for s in self._waiting.values() if s.has_begun), None)
            if len(self._running) == self._config.max_sessions:
                lent = [s for s in self._running.values() if not s.has_begun]
                if speech is None or not lent:
                    return
                self._waiting[lent[-1].session_id] = self._running.pop(lent[-1].session_id)
            speech = speech or next(iter(self._waiting.values()))
            self._running[speech.session_id] = self._waiting.pop(speech.session_id)
            self._wait(speech)

    def _wait(self, speech: _Speech) -> None:
        """Set the timer for where a chunk may end, or for as far as the text goes; none when the session needs text."""
        if speech.timer is not None:
            return
        target = min(speech.done + speech.borders.until_next(speech.done - speech.sent), speech.available)
        if target > speech.done or speech.finish_reason is not None:
            frames = target - speech.done
            speech.next_s = max(speech.next_s, time.monotonic()) + frames * self._config.frame_ms / 1e3
            speech.timer = self._timers.call_at(speech.next_s, lambda: self._advance(speech, target))

    def _advance(self, speech: _Speech, target: int) -> None:
        with self._lock:
            if self._running.get(speech.session_id) is not speech:
                return
            speech.done, speech.timer = target, None
            at_border = speech.borders.is_complete(target - speech.sent)
            finish = speech.finish_reason
            codes = self._codes(speech.sent, target)
            if at_border or finish is not None:
                speech.borders.leave(target - speech.sent)
                speech.sent = target
            if finish is None:
                self._wait(speech)
        if finish is not None:
            self._end(speech.session_id, CodesEvent(codes, finish))
        elif at_border:
            speech.sink(CodesEvent(codes))

    def _codes(self, first: int, end: int) -> Int32:
        frames = np.arange(first, end, dtype=np.int32)[:, None]
        return (frames * 31 + np.arange(self._config.code_groups, dtype=np.int32) * 17) % 2048

    def _end(self, session_id: str, last: CodesEvent | OmniError) -> None:
        with self._lock:
            speech = self._running.pop(session_id, None) or self._waiting.pop(session_id, None)
            self._admit()
        if speech is not None:
            if speech.timer is not None:
                speech.timer.cancel()
            speech.sink(last)
