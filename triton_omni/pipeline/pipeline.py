"""Admits requests and runs them over the three stages: everything between one omni_bls request and its events."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial

from triton_omni.errors import CapacityError, InvalidRequestError, OmniError, RequestTimeoutError
from triton_omni.pipeline.events import CancelToken, Emit, OmniEvent
from triton_omni.pipeline.request import OmniRequest
from triton_omni.pipeline.run import RequestRun, Roles, Stages
from triton_omni.pipeline.stages import Code2WavStage, TalkerStage, ThinkerStage
from triton_omni.pipeline.timers import Timer, Timers
from triton_omni.pipeline.workers import Workers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineConfig:
    """``max_requests`` run at a time and ``max_waiting`` wait for their turn; more are refused (CapacityError).
    ``request_timeout_s`` counts from the submission to the last event. ``append_threads`` carry answer ids to the
    talker and ``cancel_threads`` take requests back, for all requests together. ``ids_per_append`` is how many ids
    gather for one append once the first chunk's are sent (TalkerSession says what that costs). ``early_prefill``: the
    talker gets a text prompt before the first text, and computes it in the meantime.
    """

    max_requests: int = 64
    max_waiting: int = 256
    request_timeout_s: float = 600.0
    append_threads: int = 8
    cancel_threads: int = 16
    ids_per_append: int = 4
    early_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_requests", "append_threads", "cancel_threads", "ids_per_append"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.max_waiting < 0:
            raise InvalidRequestError("max_waiting", f"must be at least 0, got {self.max_waiting}")
        if not 0 < self.request_timeout_s < float("inf"):
            raise InvalidRequestError("request_timeout_s", f"must be above 0, got {self.request_timeout_s}")


class OmniPipeline:
    """Runs requests over the stages; thread-safe. At most ``2 * max_requests + append_threads + cancel_threads + 1``
    threads, made as they are needed.
    """

    def __init__(
        self, thinker: ThinkerStage, talker: TalkerStage, code2wav: Code2WavStage, config: PipelineConfig | None = None
    ) -> None:
        self._config = config or PipelineConfig()
        self._stages = Stages(thinker, talker, code2wav)
        self._roles = Roles(
            thinker=Workers("thinker", self._config.max_requests),
            speech=Workers("speech", self._config.max_requests),
            append=Workers("append", self._config.append_threads),
            cancel=Workers("cancel", self._config.cancel_threads),
        )
        self._timers = Timers("omni-deadlines")
        self._changed = threading.Condition()
        self._running: dict[RequestRun, _Entry] = {}
        self._waiting: dict[RequestRun, _Entry] = {}
        self._counts = {"finished": 0, "failed": 0, "cancelled": 0}
        self._closed = False

    def submit(self, request: OmniRequest, emit: Emit, token: CancelToken | None = None) -> str:
        """Run ``request``; returns its id at once. ``emit`` gets its events from threads of the pipeline, the last
        one always an ``is_end`` event or an OmniError:

            InvalidRequestError    the thinker refuses it (undecodable media, prompt too long)
            CapacityError          full, or closing
            RequestTimeoutError    ``request_timeout_s`` have passed
            RequestCancelledError  ``token`` was cancelled
            StageError             a stage failed; it names the stage
        """
        run = RequestRun(
            request,
            self._stages,
            self._roles,
            emit,
            ids_per_append=self._config.ids_per_append,
            early_prefill=self._config.early_prefill,
            on_done=self._done,
        )
        token = token or CancelToken()
        timeout_s = self._config.request_timeout_s
        timed_out = RequestTimeoutError(f"the request took longer than {timeout_s:g} s (request_timeout_s)")
        with self._changed:
            refusal = self._refusal()
            if refusal is None:
                starts = len(self._running) < self._config.max_requests
                timer = self._timers.call_later(timeout_s, partial(run.fail, timed_out))
                (self._running if starts else self._waiting)[run] = _Entry(timer, token)
        if refusal is not None:
            run.fail(refusal)
            return run.id
        token.on_cancel(run.fail)
        if starts:
            run.start()
        return run.id

    def stream(self, request: OmniRequest, token: CancelToken | None = None) -> Iterator[OmniEvent]:
        """Run ``request`` and give its events as they come; leaving the iterator early cancels the request.

        Raises: OmniError, as ``submit`` lists them.
        """
        token = token or CancelToken()
        events: queue.SimpleQueue[OmniEvent | OmniError] = queue.SimpleQueue()
        self.submit(request, events.put, token)
        return _iterate(events, token)

    def stats(self) -> dict[str, int]:
        """Gauges ``running`` and ``waiting``; counters ``finished``, ``failed`` and ``cancelled``."""
        with self._changed:
            return {"running": len(self._running), "waiting": len(self._waiting), **self._counts}

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse new requests, end those there are, and wait until the stages have taken them back."""
        with self._changed:
            self._closed = True
            runs = [*self._running, *self._waiting]
        for run in runs:
            run.fail(CapacityError("the server is shutting down"))
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (self._running or self._waiting) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if self._running:
                logger.warning("%d requests did not end within %g s", len(self._running), timeout_s)
        self._timers.close()
        for workers in (self._roles.thinker, self._roles.speech, self._roles.append, self._roles.cancel):
            workers.close(0.0 if self._running else timeout_s)

    def _refusal(self) -> CapacityError | None:
        if self._closed:
            return CapacityError("the server is shutting down")
        running, waiting = len(self._running), len(self._waiting)
        if running >= self._config.max_requests and waiting >= self._config.max_waiting:
            return CapacityError(f"{running} requests are running and {waiting} waiting; try again later")
        return None

    def _done(self, run: RequestRun) -> None:
        with self._changed:
            entry = self._running.pop(run, None) or self._waiting.pop(run, None)
            self._counts[run.outcome] += 1
            next_run = None
            if self._waiting and len(self._running) < self._config.max_requests:
                next_run = next(iter(self._waiting))
                self._running[next_run] = self._waiting.pop(next_run)
            self._changed.notify_all()
        if entry is not None:
            entry.timer.cancel()
            entry.token.on_cancel(None)
        if next_run is not None:
            next_run.start()


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    timer: Timer
    token: CancelToken


def _iterate(events: queue.SimpleQueue[OmniEvent | OmniError], token: CancelToken) -> Iterator[OmniEvent]:
    try:
        while True:
            event = events.get()
            if isinstance(event, OmniError):
                raise event
            yield event
            if event.is_end:
                return
    finally:
        token.cancel()
