"""The stages over engines of this process: what omni_bls has behind Triton, without Triton."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

from triton_omni.errors import OmniError
from triton_omni.pipeline.stages import (
    Code2WavEngine,
    CodesChunk,
    CodesEvent,
    Int16,
    Int32,
    PromptRows,
    TalkerEngine,
    TalkerStart,
    ThinkerEngine,
    ThinkerEvent,
    ThinkerRequest,
)

Event = TypeVar("Event", ThinkerEvent, CodesEvent)

ROWS_TIMEOUT_S = 60.0


class LocalThinker:
    """ThinkerStage over a ThinkerEngine."""

    def __init__(self, engine: ThinkerEngine) -> None:
        self._engine = engine

    def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]:
        events: queue.SimpleQueue[ThinkerEvent | OmniError] = queue.SimpleQueue()
        self._engine.submit(request, events.put)
        return _until_finished(events)

    def rows(self, request_id: str) -> PromptRows:
        return self._engine.rows(request_id, ROWS_TIMEOUT_S)

    def cancel(self, request_id: str) -> None:
        self._engine.abort(request_id)


class LocalTalker:
    """TalkerStage over a TalkerEngine. The engine frees a session by itself when it has finished."""

    def __init__(self, engine: TalkerEngine) -> None:
        self._engine = engine

    def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]:
        events: queue.SimpleQueue[CodesEvent | OmniError] = queue.SimpleQueue()
        self._engine.start(session_id, start, events.put)
        return _until_finished(events)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        self._engine.append(session_id, token_ids, text_finished)

    def end(self, session_id: str, *, cancel: bool) -> None:
        if cancel:
            self._engine.cancel(session_id)


class LocalCode2Wav:
    """Code2WavStage over a Code2WavEngine. Chunks that come while a batch is decoded form the next batch: whoever gets
    the turn first decodes for all that wait.
    """

    def __init__(self, engine: Code2WavEngine) -> None:
        self._engine = engine
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: list[_Ticket] = []

    def decode(self, chunk: CodesChunk) -> Int16:
        ticket = _Ticket(chunk)
        with self._lock:
            self._waiting.append(ticket)
        with self._turn:
            if ticket.result is None:
                self._decode_waiting()
        result = ticket.result
        if result is None or isinstance(result, Exception):
            raise result or RuntimeError("the engine gave no result")
        return result

    def _decode_waiting(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
        try:
            results: list[Int16 | OmniError] = self._engine.decode([ticket.chunk for ticket in batch])
            for ticket, result in zip(batch, results, strict=True):
                ticket.result = result
        except Exception as error:
            for ticket in batch:
                ticket.result = error


class _Ticket:
    __slots__ = ("chunk", "result")

    def __init__(self, chunk: CodesChunk) -> None:
        self.chunk = chunk
        self.result: Int16 | Exception | None = None


def _until_finished(events: queue.SimpleQueue[Event | OmniError]) -> Iterator[Event]:
    while True:
        event = events.get()
        if isinstance(event, OmniError):
            raise event
        yield event
        if event.finish_reason is not None:
            return
