"""One request on its way through the stages.

    reader thread   thinker's events ──> text deltas to the caller
                          └─ answer ids ──> TalkerSession (appends run on threads of their own)
    speech thread   talker's codes ──> code2wav ──> audio to the caller

The speech thread begins with the prompt, so that the talker computes it while the thinker does; where the talker needs
the thinker's rows of it (media), or the answer may be a call and nothing to be said (tools), with the first answer id.
Text never waits for speech: ids (4 bytes each, at most the answer's length) gather in the talker session. Codes are
taken from the talker one chunk at a time, when the vocoder is free. Whatever ends the request early, a failed stage,
the caller or the deadline, goes through ``fail``: it decides the terminal event and takes the request back from all
three stages, each on a thread of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from triton_omni.errors import InvalidRequestError, OmniError, RequestCancelledError, StageError
from triton_omni.pipeline.events import Emit, OmniEvent
from triton_omni.pipeline.progress import Progress
from triton_omni.pipeline.request import OmniRequest
from triton_omni.pipeline.sessions import TalkerSession, VocoderSession
from triton_omni.pipeline.stages import (
    NO_IDS,
    Code2WavStage,
    CodesEvent,
    Int32,
    PromptRows,
    TalkerStage,
    ThinkerEvent,
    ThinkerRequest,
    ThinkerStage,
)
from triton_omni.pipeline.workers import Workers
from triton_omni.sampling import ThinkerSampling

logger = logging.getLogger(__name__)
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(ThinkerSampling))


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """The three stages, in this process or behind Triton."""

    thinker: ThinkerStage
    talker: TalkerStage
    code2wav: Code2WavStage


@dataclasses.dataclass(frozen=True, slots=True)
class Roles:
    """The threads of all runs, one pool per role: readers, speech drivers, appends, and what takes requests back."""

    thinker: Workers
    speech: Workers
    append: Workers
    cancel: Workers


class RequestRun:
    """Runs one request. ``on_done`` is called once, when its terminal event is out and no thread works for it."""

    def __init__(
        self,
        request: OmniRequest,
        stages: Stages,
        roles: Roles,
        emit: Emit,
        *,
        ids_per_append: int,
        early_prefill: bool,
        on_done: Callable[[RequestRun], None],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.outcome = "running"
        self._log_id = f"{self.id} ({request.client_request_id})" if request.client_request_id else self.id
        self._want_rows = request.speech and bool(request.media)
        self._thinker_request: ThinkerRequest | None = ThinkerRequest(
            request_id=self.id,
            messages=request.messages,
            media=request.media,
            sampling=request.thinker,
            tools=request.tools,
            use_audio_in_video=request.use_audio_in_video,
            want_rows=self._want_rows,
        )
        self._speech = request.speech
        self._speaker = request.speaker
        self._talker_sampling = request.talker
        self._async_chunk = request.async_chunk
        self._early_prefill = early_prefill and request.async_chunk and not request.media and request.tools is None
        self._continuous_usage = request.continuous_usage
        self._stages = stages
        self._roles = roles
        self._talker = TalkerSession(
            stages.talker, f"{self.id}-talker", request.chunk_plan, ids_per_append, roles.append, self._append_failed
        )
        self._vocoder = VocoderSession(stages.code2wav, f"{self.id}-code2wav")
        self._prompt_token_ids = NO_IDS
        self._speaking = False
        self._progress = Progress()
        self._emit = emit
        self._emit_lock = threading.Lock()
        self._state = threading.Lock()  # guards what follows
        self._on_done: Callable[[RequestRun], None] | None = on_done
        self._over = False
        self._parts = 0
        self._reading = False

    def start(self) -> None:
        """Begin; returns at once."""
        self._spawn(self._roles.thinker, self._read_thinker)

    def fail(self, error: OmniError) -> None:
        """End the request with ``error`` unless it is over, and take it back from every stage. Returns at once."""
        with self._state:
            if self._over:
                return
            self._over = True
            self.outcome = "cancelled" if isinstance(error, RequestCancelledError) else "failed"
            self._parts += 1  # until the terminal event is out
            begun = self._thinker_request is None
            with_thinker = self._reading or (begun and self._want_rows)
        quiet = isinstance(error, (RequestCancelledError, InvalidRequestError))
        logger.log(logging.DEBUG if quiet else logging.WARNING, "request %s: %s", self._log_id, error.to_wire())
        if with_thinker:
            self._spawn(self._roles.cancel, self._cancel_thinker)
        if begun and self._speech:
            self._spawn(self._roles.cancel, lambda: self._end_speech(cancel=True))
            if self._vocoder.close():  # END waits for the vocoder, and that must keep nobody else's cancel waiting
                self._spawn(self._roles.speech, self._end_vocoder)
        self._send_terminal(error)
        self._part_done()

    # ---- text

    def _read_thinker(self) -> None:
        with self._state:
            request, self._thinker_request = self._thinker_request, None
            if self._over or request is None:
                return
            self._reading = True
        finish_reason = None
        try:
            events = iter(self._stages.thinker.generate(request))
            del request  # the bytes of the media are the thinker's now
            for event in events:
                finish_reason = event.finish_reason
                self._take_thinker_event(event)
            if finish_reason not in ("stop", "length"):
                raise StageError("thinker", f"ended its answer with finish reason {finish_reason}")
            if self._want_rows and not self._speaking:
                self._cancel_thinker()  # nobody will fetch the rows of an empty answer
        except Exception as error:
            self._stage_failed("thinker", _as_sent(error))
        finally:
            with self._state:
                self._reading = False

    def _take_thinker_event(self, event: ThinkerEvent) -> None:
        if event.prompt_token_ids is not None:
            self._prompt_token_ids = event.prompt_token_ids
            self._progress.prompt_tokens = event.prompt_token_ids.size
            self._send(OmniEvent(info=self._progress.start_info(self.id)))
            if self._over:  # the cancel may have been faster than the request
                self._cancel_thinker()
        finished = event.finish_reason is not None
        self._progress.add_tokens(event)
        self._progress.thinker_finish = event.finish_reason
        if event.text:
            self._progress.add_text()
        if event.text or event.tool_calls or event.logprobs:
            self._send(OmniEvent(text=event.text, info=self._delta_info(event)))
        if not self._speech or self._over:
            return
        self._talker.add(event.token_ids, finished)
        begins = self._progress.spoken_tokens and (finished or self._async_chunk)
        if not self._speaking and (begins or self._early_prefill):
            self._speaking = True
            self._spawn(self._roles.speech, self._speak)

    def _delta_info(self, event: ThinkerEvent) -> dict[str, Any]:
        info: dict[str, Any] = {}
        if self._continuous_usage:
            info["usage"] = {"text_tokens": self._progress.text_tokens}
        if event.tool_calls:
            info["tool_calls"] = event.tool_calls
        if event.logprobs:
            info["logprobs"] = event.logprobs
        return info

    def _cancel_thinker(self) -> None:
        with self._quietly("cancel the thinker"):
            self._stages.thinker.cancel(self.id)

    # ---- speech

    def _speak(self) -> None:
        cancel = True
        try:
            self._vocode(self._talker.start(self._prompt_token_ids, self._speaker, self._talker_sampling, self._rows()))
            cancel = False
        except Exception as error:
            self._stage_failed("talker", error)
        finally:
            self._end_speech(cancel=cancel)
            if self._vocoder.close():
                self._end_vocoder()

    def _rows(self) -> PromptRows | None:
        with _blamed_on("thinker"):
            return self._stages.thinker.rows(self.id) if self._want_rows else None

    def _vocode(self, events: Iterator[CodesEvent]) -> None:
        self._prompt_token_ids = NO_IDS
        gathered: list[Int32] = []
        finish_reason = None
        for event in events:
            finish_reason = event.finish_reason
            if self._over:
                continue  # to the end of the stream, which the cancel brings
            if self._async_chunk:
                self._decode(event.codes, end=finish_reason is not None)
            else:
                gathered.append(event.codes)
        if finish_reason not in ("stop", "length"):
            raise StageError("talker", f"ended its speech with finish reason {finish_reason}")
        self._progress.talker_finish = finish_reason
        if gathered:
            self._decode(np.concatenate(gathered), end=True)

    def _decode(self, codes: Int32, *, end: bool) -> None:
        with _blamed_on("code2wav"):
            samples = self._vocoder.decode(codes, end=end)
        self._progress.add_audio(codes.shape[0], samples.size)
        if samples.size:
            self._send(OmniEvent(audio=samples))

    def _append_failed(self, error: Exception) -> None:
        self._stage_failed("talker", error)

    def _end_speech(self, *, cancel: bool) -> None:
        with self._quietly("end the talker's session"):
            self._talker.end(cancel=cancel)

    def _end_vocoder(self) -> None:
        with self._quietly("end the vocoder's session"):
            self._vocoder.end()

    # ---- events, failures and the end

    def _send(self, event: OmniEvent) -> None:
        try:
            with self._emit_lock:
                if not self._over:
                    self._emit(event)
        except Exception as error:
            logger.exception("request %s: its caller failed to take an event", self._log_id)
            self.fail(RequestCancelledError(f"the caller failed to take an event: {error}"))

    def _send_terminal(self, event: OmniEvent | OmniError) -> None:
        try:
            with self._emit_lock:
                self._emit(event)
        except Exception:
            logger.exception("request %s: its caller failed to take the terminal event", self._log_id)

    def _stage_failed(self, stage: str, error: Exception) -> None:
        if self._over:
            logger.debug("request %s: the %s ended after the request: %s", self._log_id, stage, error)
        elif isinstance(error, OmniError):
            self.fail(error)
        else:
            logger.error("request %s: the %s failed", self._log_id, stage, exc_info=error)
            self.fail(StageError(stage, f"{type(error).__name__}: {error}"))

    @contextmanager
    def _quietly(self, what: str) -> Iterator[None]:
        """For calls that take a session back: the request's outcome does not depend on them any more."""
        try:
            yield
        except Exception as error:
            logger.log(
                logging.DEBUG if self._over else logging.WARNING,
                "request %s: could not %s: %s",
                self._log_id,
                what,
                error,
            )

    def _spawn(self, role: Workers, part: Callable[[], None]) -> None:
        def work() -> None:
            try:
                part()
            finally:
                self._part_done()

        with self._state:
            self._parts += 1
        role.submit(work)

    def _part_done(self) -> None:
        with self._state:
            self._parts -= 1
            if self._parts:
                return
            finished = not self._over
            if finished:
                self._over = True
                self.outcome = "finished"
            on_done, self._on_done = self._on_done, None
        if finished:
            self._send_terminal(OmniEvent(info=self._progress.end_info()))
        if on_done is not None:
            on_done(self)


@contextmanager
def _blamed_on(stage: str) -> Iterator[None]:
    """Errors that are none of ours become StageErrors of ``stage``."""
    try:
        yield
    except OmniError:
        raise
    except Exception as error:
        logger.exception("the %s failed", stage)
        raise StageError(stage, f"{type(error).__name__}: {error}") from error


def _as_sent(error: Exception) -> Exception:
    """The thinker names its sampling's fields bare; in a request to the pipeline they stand under ``thinker``."""
    if isinstance(error, InvalidRequestError) and str(error.field).partition(".")[0] in _SAMPLING_FIELDS:
        return type(error)(f"thinker.{error.field}", error.message)
    return error
