"""The code2wav engine: sessions over slots, a ragged batch of chunks per call."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from triton_omni.code2wav.runner import Row, RowDecoder, Wave, to_int16
from triton_omni.code2wav.slots import SlotPool
from triton_omni.errors import CapacityError, InvalidRequestError, NotFoundError, OmniError, StageError
from triton_omni.pipeline.stages import CodesChunk, Int16, Int32

logger = logging.getLogger(__name__)

STAGE = "code2wav"


@dataclasses.dataclass(slots=True)
class _Session:
    slot: int
    last_used_s: float
    frames: int = 0


class StreamingEngine:
    """Code2WavEngine over a RowDecoder with ``max_sessions`` slots. Thread-safe: calls run one after the other.

    A refused chunk leaves its session as it was, except that ``end`` always frees it. A forward that fails closes the
    sessions it worked on, because their state is unknown then. ``is_lost``: asked after that whether any other forward
    can succeed; where none can the engine closes and calls ``on_death``, from within ``decode``. ``clock`` gives
    seconds and never goes back.
    """

    def __init__(
        self,
        runner: RowDecoder,
        *,
        max_sessions: int,
        idle_timeout_s: float,
        is_lost: Callable[[], bool] = lambda: False,
        on_death: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._shape = runner.shape
        self._max_sessions = max_sessions
        self._idle_timeout_s = idle_timeout_s
        self._is_lost, self._on_death = is_lost, on_death
        self._clock = clock
        self._lock = threading.Lock()
        self._free = SlotPool(max_sessions)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # longest unused first
        self._expired = 0
        self._closed = False

    def decode(self, chunks: Sequence[CodesChunk]) -> list[Int16 | OmniError]:
        """One result per chunk, in order: int16 [samples], those that became final, or the error of that chunk alone.

        Chunks may be of any length, several of one session are taken in order. Errors: InvalidRequestError ("codes":
        shape, dtype or range; "start": the session lives already), NotFoundError ("session_id": not started, ended or
        expired), CapacityError (all slots taken), StageError (the forward failed, or the engine is closed).
        """
        return self._decode(chunks, to_int16)

    def decode_full(self, codes: Int32) -> Wave:
        """The wave of a whole utterance, float [samples] in [-1, 1] in the model's dtype, before rounding to int16.

        codes int32 [frames, code_groups]. Needs one free slot while it runs; other calls run between its pieces.
        Raises: what ``decode`` returns as errors.
        """
        self._check_codes(codes)
        session_id = f"decode_full-{uuid.uuid4()}"
        piece_frames = self._runner.max_step_frames
        starts = range(0, max(1, len(codes)), piece_frames)
        waves = []
        for start in starts:
            piece = codes[start : start + piece_frames]
            chunk = CodesChunk(session_id, piece, start=start == 0, end=start == starts[-1])
            [wave] = self._decode([chunk], lambda samples: samples)
            if isinstance(wave, OmniError):
                raise wave
            waves.append(wave)
        return np.concatenate(waves)

    def stats(self) -> dict[str, int]:
        """Gauges ``running`` (live sessions) and ``slots_free``; counter ``expired``: sessions dropped for want of
        chunks.
        """
        with self._lock:
            self._expire()
            return {
                "running": len(self._sessions),
                "slots_free": len(self._free),
                "expired": self._expired,
            }

    def close(self) -> None:
        """Drop all sessions; later chunks are refused."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._closed = True
        for session_id in list(self._sessions):
            self._drop(session_id)

    def _decode(self, chunks: Sequence[CodesChunk], finish: Callable[[Tensor], Tensor]) -> list[Wave | OmniError]:
        results: dict[int, Wave | OmniError] = {}
        waiting = list(enumerate(chunks))
        with self._lock:
            if self._closed:
                return [_closed() for _ in chunks]
            self._expire()
            while waiting and not self._closed:
                batch, waiting = self._admit(waiting, results)
                self._run(batch, results, finish)
            results |= {index: _closed() for index, _ in waiting}
        return [results[index] for index in range(len(chunks))]

    def _admit(
        self, waiting: Iterable[tuple[int, CodesChunk]], results: dict[int, Wave | OmniError]
    ) -> tuple[list[tuple[int, CodesChunk]], list[tuple[int, CodesChunk]]]:
        """Chunks that can run together, and those that wait: for their session's earlier chunk, or for a slot that a
        chunk of this batch will free. Errors go to ``results``.
        """
        batch: list[tuple[int, CodesChunk]] = []
        later: list[tuple[int, CodesChunk]] = []
        taken: set[str] = set()
        slot_to_come = False
        for index, chunk in waiting:
            starts = chunk.start and chunk.session_id not in self._sessions
            if chunk.session_id in taken or (starts and not self._free and slot_to_come):
                taken.add(chunk.session_id)
                later.append((index, chunk))
                continue
            try:
                self._open(chunk)
            except OmniError as error:
                results[index] = error
                if chunk.end and not chunk.start:  # a refused start has opened nothing
                    self._drop(chunk.session_id)
                continue
            taken.add(chunk.session_id)
            batch.append((index, chunk))
            slot_to_come = slot_to_come or chunk.end
        return batch, later

    def _open(self, chunk: CodesChunk) -> None:
        """Check a chunk, and give its session a slot if it begins one."""
        self._check_codes(chunk.codes)
        live = chunk.session_id in self._sessions
        if chunk.start and live:
            raise InvalidRequestError("start", f"session {chunk.session_id!r} has started already")
        if chunk.start:
            slot = self._free.take()
            if slot is None:
                raise CapacityError(
                    f"all {self._max_sessions} sessions of {STAGE} are taken; max_sessions must be as large as the "
                    "number of requests that run at once",
                    field="session_id",
                )
            self._sessions[chunk.session_id] = _Session(slot, self._clock())
        elif not live:
            raise NotFoundError(
                "session_id",
                f"no session {chunk.session_id!r}: begin it with start; it has ended, or was dropped after "
                f"{self._idle_timeout_s:g} s without a chunk",
            )

    def _check_codes(self, codes: Int32) -> None:
        groups, size = self._shape.code_groups, self._shape.codebook_size
        if codes.ndim != 2 or codes.shape[1] != groups or not np.issubdtype(codes.dtype, np.integer):
            raise InvalidRequestError(
                "codes", f"must be integers [frames, {groups}], got {codes.dtype} {list(codes.shape)}"
            )
        wrong = (codes < 0) | (codes >= size)
        if wrong.any():
            frame, group = np.argwhere(wrong)[0]
            raise InvalidRequestError(
                "codes", f"must lie in 0..{size - 1}, got {codes[frame, group]} in frame {frame}, group {group}"
            )

    def _run(
        self,
        batch: Sequence[tuple[int, CodesChunk]],
        results: dict[int, Wave | OmniError],
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        sessions = [self._sessions[chunk.session_id] for _, chunk in batch]
        rows = [Row(s.slot, s.frames, chunk.codes) for s, (_, chunk) in zip(sessions, batch, strict=True)]
        try:
            waves = self._runner.decode(rows, finish)
        except Exception as error:
            logger.exception("code2wav: a forward over %d sessions failed; they are closed", len(batch))
            for index, chunk in batch:
                results[index] = StageError(STAGE, f"the decoder failed: {error}")
                self._drop(chunk.session_id)
            if self._is_lost():
                logger.error("code2wav: its device can run no further forward: it closes")
                self._close()
                self._on_death()
            return
        now_s = self._clock()
        for session, (index, chunk), wave in zip(sessions, batch, waves, strict=True):
            results[index] = wave
            session.frames += len(chunk.codes)
            session.last_used_s = now_s
            self._sessions.move_to_end(chunk.session_id)
            if chunk.end:
                self._drop(chunk.session_id)

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._free.give_back(session.slot)

    def _expire(self) -> None:
        limit_s = self._clock() - self._idle_timeout_s
        while self._sessions:
            session_id, session = next(iter(self._sessions.items()))
            if session.last_used_s > limit_s:
                return
            logger.warning("code2wav: session %s dropped, no chunk for %g s", session_id, self._idle_timeout_s)
            self._drop(session_id)
            self._expired += 1


def _closed() -> StageError:
    return StageError(STAGE, "is closed")
