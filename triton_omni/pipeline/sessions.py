"""One request's sessions with the two stages that keep state: opened once, ended once, never left behind.

Both may be ended from any thread while another one works with them, and an END never overtakes what is on its way to
the stage: the talker's waits for it, the vocoder's is left to the thread whose chunk is being decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from triton_omni.errors import RequestCancelledError
from triton_omni.pipeline.chunk_policy import ChunkPlan
from triton_omni.pipeline.events import NO_SAMPLES
from triton_omni.pipeline.stages import (
    NO_IDS,
    Code2WavStage,
    CodesChunk,
    CodesEvent,
    Int16,
    Int32,
    PromptRows,
    TalkerStage,
    TalkerStart,
)
from triton_omni.pipeline.workers import Workers
from triton_omni.sampling import TalkerSampling


class TalkerSession:
    """Hands answer ids to the talker. ``add`` never blocks; the append itself runs on ``workers``.

    All ids that are ready leave in one append. Frame t needs answer id t, so until the first chunk is complete every
    id goes at once; after it ids leave in groups of ``ids_per_append`` that end at the borders of the chunk plan: no
    chunk waits for an id it does not need, and the talker lags by fewer steps than a group has ids. A chunk that an
    adaptive plan would cut short may wait for the rest of a group.
    """

    def __init__(
        self,
        stage: TalkerStage,
        session_id: str,
        plan: ChunkPlan,
        ids_per_append: int,
        workers: Workers,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._stage = stage
        self._id = session_id
        self._plan = plan
        self._ids_per_append = ids_per_append
        self._workers = workers
        self._on_error = on_error
        self._call = threading.Lock()  # held during calls to the stage
        self._ended = False
        self._state = threading.Lock()  # guards what follows; held for moments only
        self._ids: list[Int32] = []
        self._sent = 0
        self._text_finished = False
        self._open = False
        self._appending = False

    def start(
        self, prompt_token_ids: Int32, speaker: str, sampling: TalkerSampling, rows: PromptRows | None
    ) -> Iterator[CodesEvent]:
        """Open the session with the ids that have been added. Raises RequestCancelledError after ``end``."""
        with self._call:
            if self._ended:
                raise RequestCancelledError("the request ended before its speech began")
            with self._state:
                self._open = self._appending = True  # nobody appends before START is through
                token_ids, text_finished = self._take()
            start = TalkerStart(
                prompt_token_ids=prompt_token_ids,
                speaker=speaker,
                sampling=sampling,
                chunk_frames=self._plan.frames,
                chunk_policy=self._plan.policy,
                prompt_rows=rows,
                token_ids=token_ids,
                text_finished=text_finished,
            )
            codes = self._stage.start(self._id, start)
            with self._state:
                more_is_due = not text_finished and self._due()
                self._appending = text_finished or more_is_due
            if more_is_due:  # not _appending: what ``add`` has begun since is its own
                self._workers.submit(self._append)
        return codes

    def add(self, token_ids: Int32, text_finished: bool) -> None:
        """Take new answer ids; ``text_finished`` with the last ones."""
        with self._state:
            if token_ids.size:
                self._ids.append(token_ids)
            self._text_finished |= text_finished
            if not self._open or self._appending or not self._due():
                return
            self._appending = True
        self._workers.submit(self._append)

    def end(self, *, cancel: bool) -> None:
        """END, once, and only if the session was opened. Waits for a call that is under way."""
        with self._call:
            if self._ended:
                return
            self._ended = True
            if self._open:
                self._stage.end(self._id, cancel=cancel)

    def _append(self) -> None:
        while True:
            with self._call:
                with self._state:
                    if self._ended or not self._due():
                        self._appending = False
                        return
                    token_ids, text_finished = self._take()
                try:
                    self._stage.append(self._id, token_ids, text_finished)
                except Exception as error:
                    failure = error
                    break
            if text_finished:
                return
        self._on_error(failure)

    def _due(self) -> bool:
        ready = self._sent + sum(ids.size for ids in self._ids)
        if self._text_finished or self._sent < self._plan.frames[0]:
            return self._text_finished or ready > self._sent
        return ready >= min(self._sent + self._ids_per_append, self._plan.next_border(self._sent))

    def _take(self) -> tuple[Int32, bool]:
        token_ids = np.concatenate([NO_IDS, *self._ids])
        self._ids.clear()
        self._sent += token_ids.size
        return token_ids, self._text_finished


class VocoderSession:
    """Feeds chunks of codes to code2wav; the first opens its session. One thread at a time decodes; any may close."""

    def __init__(self, stage: Code2WavStage, session_id: str) -> None:
        self._stage = stage
        self._id = session_id
        self._state = threading.Lock()  # guards what follows; held for moments only
        self._started = False
        self._decoding = False
        self._closed = False
        self._ended = False  # END is through, on its way, or somebody's task
        self._code_groups = 0

    def decode(self, codes: Int32, *, end: bool) -> Int16:
        """int16 [samples] that became final with ``codes`` int32 [frames, code_groups]. Raises RequestCancelledError
        after ``close``.
        """
        with self._state:
            if self._closed:
                raise RequestCancelledError("the request ended before its speech did")
            if not self._started and not codes.shape[0]:
                return NO_SAMPLES
            chunk = CodesChunk(self._id, codes, start=not self._started, end=end)
            self._started = self._decoding = True
            self._closed = self._ended = end
            self._code_groups = codes.shape[1]
        try:
            return self._stage.decode(chunk)
        finally:
            with self._state:
                self._decoding = False
                must_end = self._take_end()
            if must_end:
                self.end()

    def close(self) -> bool:
        """Take no more chunks; returns at once. True: the caller has to see to ``end``. Else there is nothing to end,
        or somebody does: the thread whose chunk is being decoded, behind that chunk, or who closed before.
        """
        with self._state:
            self._closed = True
            return self._take_end()

    def end(self) -> None:
        """END: frees the session. Waits for the stage, which may be in a forward with others' chunks."""
        self._stage.decode(CodesChunk(self._id, np.empty((0, self._code_groups), np.int32), end=True))

    def _take_end(self) -> bool:
        if not self._closed or not self._started or self._decoding or self._ended:
            return False
        self._ended = True
        return True
