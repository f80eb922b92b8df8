"""Continuous batching over speech sessions: one thread that schedules, runs and hands out, step after step.

On a device that runs ahead of the host a step is launched before the codes of the one in front of it are read: the
device never waits for the host. A session that turns out to have ended ignores its row of the step in flight.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from triton_omni.errors import InvalidRequestError, OmniError, StageError
from triton_omni.pipeline.chunk_policy import ChunkBorders
from triton_omni.pipeline.stages import CodesEvent, Int32, TalkerSink, TalkerStart
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.prefill import Prefill, check_text_ids, plan_prefill
from triton_omni.talker.runner import PendingFrames, Piece, Runner
from triton_omni.talker.session import Chunks, Phase, Session, Text

logger = logging.getLogger(__name__)

STAGE = "talker"
# A prompt must leave room for this many frames (two seconds), or for max_frames if that is less.
MIN_ROOM_FRAMES = 25


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Rows ``first`` up to ``last`` of a session's prompt."""

    session: Session
    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one turn of the loop does, in this order. ``prefill``: chunks of prompts to compute, one after the other;
    ``batch``: sessions with the text token each of them speaks next.
    """

    ended: list[tuple[Session, CodesEvent | OmniError]]
    prefill: list[list[Share]]
    batch: list[tuple[Session, int]]


class LocalTalkerEngine:
    """The TalkerEngine of this process.

    A session whose text has not begun has its prompt computed while slots are free, and takes none from a session with
    text: it gives its slot back to one. Once it speaks, it is in the batch whenever its next token has arrived. All
    errors of a session go to its sink.

    ``is_lost``: asked after a step that failed whether any other can succeed. ``on_death`` is called once, when none
    can, and every session that was open has its error. ``now_s`` tells the time.
    """

    def __init__(
        self,
        runner: Runner,
        config: TalkerConfig,
        *,
        is_lost: Callable[[], bool] = lambda: False,
        on_death: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._config, self._now_s = runner, config, now_s
        self._is_lost, self._on_death = is_lost, on_death
        self._shape = runner.shape
        runs_ahead = runner.runs_ahead if config.async_output is None else config.async_output
        self._steps_ahead = 1 if runs_ahead else 0
        self._in_flight: collections.deque[tuple[list[Session], PendingFrames]] = collections.deque()
        self._changed = threading.Condition()
        self._sessions: dict[str, Session] = {}
        self._free = list(reversed(range(config.max_sessions)))
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="talker", daemon=True)
        self._thread.start()

    def start(self, session_id: str, start: TalkerStart, sink: TalkerSink) -> None:
        """Open a session. ``sink`` gets its CodesEvents, or an InvalidRequestError naming what is wrong with it."""
        session = Session(
            session_id=session_id,
            sink=sink,
            sampling=start.sampling,
            seed=secrets.randbits(63) if start.sampling.seed is None else start.sampling.seed,
            text=Text(self._shape.text),
            chunks=Chunks(ChunkBorders(start.chunk_frames, start.chunk_policy, self._now_s), self._shape.groups),
            prefill=None,
        )
        try:
            session.prefill = self._plan(start)
            if session.prefill is not None:
                session.text.append(session.prefill.answer_ids, finished=False)
            self._hear(session, start.token_ids, start.text_finished)
        except InvalidRequestError as error:
            session.failure = error
        with self._changed:
            if not self._closed and session_id not in self._sessions:
                self._sessions[session_id] = session
                self._changed.notify()
                return
            closed = self._closed
        # The sink of a session that never was is told here: the engine's thread does not know it.
        _tell(session, _CLOSED if closed else InvalidRequestError("session_id", f"{session_id!r} is already open"))

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        """More of the answer. A session that has ended meanwhile has no use for it: no error."""
        with self._changed:
            session = self._sessions.get(session_id)
            if session is None:
                return
            try:
                self._hear(session, token_ids, text_finished)
            except InvalidRequestError as error:
                session.failure = error
            self._changed.notify()

    def cancel(self, session_id: str) -> None:
        """End a session with finish_reason "cancelled", wherever it stands."""
        with self._changed:
            session = self._sessions.get(session_id)
            if session is not None:
                session.cancelled = True
                self._changed.notify()

    def stats(self) -> dict[str, int]:
        """``running`` sessions hold a slot; ``waiting`` ones have text but no slot; ``waiting_for_text`` counts those
        that could go on if their next token were there; ``slots_free``.
        """
        with self._changed:
            sessions = list(self._sessions.values())
            waiting = [s for s in sessions if s.phase is Phase.WAITING and s.text.has_next]
            return {
                "running": sum(s.slot >= 0 for s in sessions),
                "waiting": len(waiting),
                "waiting_for_text": sum(not s.text.has_next for s in sessions),
                "slots_free": len(self._free),
            }

    def close(self) -> None:
        """Stop the thread. Sessions still open end with a StageError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _plan(self, start: TalkerStart) -> Prefill | None:
        if not start.chunk_frames or min(start.chunk_frames) < 1:
            raise InvalidRequestError("chunk_frames", f"must hold sizes of at least 1, got {start.chunk_frames}")
        prefill = plan_prefill(start, self._shape)
        if prefill is not None:
            room = min(start.sampling.max_frames, MIN_ROOM_FRAMES)
            frames = min(start.sampling.max_frames, self._config.max_context - prefill.rows)
            if prefill.next_position + frames > self._shape.max_positions:
                raise InvalidRequestError(
                    "prompt_rows",
                    f"positions end at {prefill.next_position}, and with {frames} frames after them they must stay "
                    f"within the checkpoint's max_position_embeddings {self._shape.max_positions}",
                )
            if prefill.rows + room > self._config.max_context:
                raise InvalidRequestError(
                    "prompt_token_ids",
                    f"is too long to be spoken about: {prefill.rows} talker rows and at least {room} frames must fit "
                    f"into max_context {self._config.max_context}",
                )
        return prefill

    def _hear(self, session: Session, token_ids: Int32, text_finished: bool) -> None:
        ids = np.asarray(token_ids)
        check_text_ids("token_ids", ids, self._shape)
        if len(ids) and session.text.finished:
            raise InvalidRequestError("token_ids", "must not follow text_finished")
        session.text.append(ids.tolist(), text_finished)

    # The engine's thread: schedule, run, hand out.

    def _loop(self) -> None:
        died = False
        try:
            while (work := self._schedule()) is not None:
                self._turn(work)
        except Exception:
            logger.exception("the talker can make no further step: it closes")
            died = True
        with self._changed:
            self._closed = True
            left = list(self._sessions.values())
        for session in left:
            self._end(session, _CLOSED)
        if died:
            self._on_death()

    def _turn(self, work: Work) -> None:
        for session, event in work.ended:
            self._end(session, event)
        for chunk in work.prefill:
            # a chunk that failed has ended sessions of the next one
            if shares := [share for share in chunk if share.session.phase is not Phase.ENDED]:
                with self._blaming([share.session for share in shares]):
                    self._prefill(shares)
        # a failed prefill has ended sessions of this batch
        batch = [(session, text_id) for session, text_id in work.batch if session.phase is Phase.SPEAKING]
        if batch:
            sessions = [session for session, _ in batch]
            with self._blaming(sessions):
                self._in_flight.append((sessions, self._decode(batch)))
        if self._in_flight and (len(self._in_flight) > self._steps_ahead or not batch):
            sessions, frames = self._in_flight.popleft()
            with self._blaming(sessions):
                self._hand_out(sessions, frames.read())

    def _schedule(self) -> Work | None:
        """Wait until there is something to do. None when the engine closes."""
        with self._changed:
            while not self._closed:
                ended = [(s, end) for s in self._sessions.values() if (end := s.early_end()) is not None]
                ending = {id(session) for session, _ in ended}
                alive = [s for s in self._sessions.values() if id(s) not in ending]
                self._admit(alive)
                prefill = self._plan_chunks(alive)
                batch = [(s, s.text.take()) for s in alive if s.can_speak(self._config.max_context)]
                if ended or prefill or batch or self._in_flight:
                    return Work(ended, prefill, batch)
                self._changed.wait()
            return None

    def _admit(self, sessions: list[Session]) -> None:
        """Give slots to waiting sessions, those with text first, each kind in order of arrival."""
        waiting = [s for s in sessions if s.phase is Phase.WAITING]
        for session in _with_text_first(waiting):
            if not self._free and session.text.has_next:
                self._take_a_slot_back(sessions)
            if not self._free:
                return
            session.slot = self._free.pop()
            session.phase = Phase.PREFILL

    def _take_a_slot_back(self, sessions: list[Session]) -> None:
        """From the session that came last of those whose text has not begun, if there is one: it waits again."""
        for session in reversed(sessions):
            if session.slot >= 0 and not session.has_begun:
                self._free.append(session.slot)
                session.give_slot_back()
                return

    def _plan_chunks(self, sessions: list[Session]) -> list[list[Share]]:
        """The chunks of prompts that come before the next step. Several at once let many new sessions begin sooner,
        while those who speak live on what their players have; one that may run dry is kept waiting by one at most.
        """
        if not any(s.phase is Phase.PREFILL for s in sessions):
            return []
        speaking = [s for s in sessions if s.can_speak(self._config.max_context)]
        most = self._config.prefill_chunks_per_step if all(s.chunks.is_ahead() for s in speaking) else 1
        chunks: list[list[Share]] = []
        prompts = _with_text_first([s for s in sessions if s.phase is Phase.PREFILL])
        while len(chunks) < most and (shares := self._share_out([s for s in prompts if s.phase is Phase.PREFILL])):
            chunks.append(shares)
        return chunks

    def _share_out(self, sessions: list[Session]) -> list[Share]:
        """``prefill_chunk`` rows among sessions with a prompt to compute, in this order. A session whose prompt is
        computed with that speaks in the same turn, if it has text.
        """
        shares, left = [], self._config.prefill_chunk
        for session in sessions:
            assert session.prefill is not None
            rows = min(left, session.prefill.rows - session.rows)
            if rows == 0:
                break
            left -= rows
            shares.append(Share(session, session.rows, session.rows + rows))
            session.rows += rows
            if session.rows == session.prefill.rows:
                session.phase = Phase.SPEAKING
        return shares

    def _prefill(self, shares: list[Share]) -> None:
        pieces = []
        for share in shares:
            session = share.session
            assert session.prefill is not None
            if session.prompt is None:
                session.prompt = self._runner.open(session.slot, session.prefill, session.sampling, session.seed)
            pieces.append(Piece(session.prompt, share.first, share.last))
            if share.last == session.prefill.rows:
                session.prompt = None
        self._runner.prefill(pieces)

    def _decode(self, batch: list[tuple[Session, int]]) -> PendingFrames:
        for session, _ in batch:
            session.rows += 1
        return self._runner.decode(
            slots=[session.slot for session, _ in batch],
            text_ids=[text_id for _, text_id in batch],
            limit=max(session.rows for session, _ in batch),
        )

    def _hand_out(self, sessions: list[Session], frames: Int32) -> None:
        """Give each session what is due with its frame of ``frames`` [B, groups]."""
        for session, frame in zip(sessions, frames, strict=True):
            if session.phase is Phase.ENDED:
                continue
            event = session.add_frame(frame, self._shape.codec.eos, self._config.max_context)
            if event is None:
                continue
            if event.finish_reason is None:
                _tell(session, event)
            else:
                self._end(session, event)

    @contextlib.contextmanager
    def _blaming(self, sessions: list[Session]) -> Iterator[None]:
        """An exception inside ends these sessions and no others, unless it is the device's last."""
        try:
            yield
        except Exception as error:
            logger.exception("step of %d sessions failed", len(sessions))
            for session in sessions:
                self._end(session, StageError(STAGE, f"{type(error).__name__}: {error}"))
            if self._is_lost():
                raise

    def _end(self, session: Session, event: CodesEvent | OmniError) -> None:
        """Forget a session, give its slot back, then tell its sink. Does nothing for one that has ended."""
        with self._changed:
            if self._sessions.get(session.session_id) is not session:
                return
            del self._sessions[session.session_id]
            session.phase = Phase.ENDED
            if session.slot >= 0:
                self._free.append(session.slot)
        _tell(session, event)


_CLOSED = StageError(STAGE, "the engine is closed")


def _with_text_first(sessions: list[Session]) -> list[Session]:
    return sorted(sessions, key=lambda session: not session.text.has_next)


def _tell(session: Session, event: CodesEvent | OmniError) -> None:
    try:
        session.sink(event)
    except Exception:
        logger.exception("session %s: its sink failed; cancelled", session.session_id)
        session.cancelled = True
