"""One owner for ``send()`` and ``is_cancelled()`` of every open request of a model instance.

Engines hand events over to its thread and never wait for Triton; what is due first leaves first. One owner at a time
matters for more than speed: the server dies when ``is_cancelled()`` is asked after the final response, and sends of
several threads may change places.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import triton_python_backend_utils as pb_utils

from triton_omni.errors import OmniError, StageError
from triton_omni.triton.due import AT_LAST, DueQueue, DueTimes
from triton_omni.triton.late_errors import late_error_tensors
from triton_omni.triton.tensors import forget_constants
from triton_omni.triton.wakeups import PARAMETER, Record, WakeupWriter, is_target

logger = logging.getLogger(__name__)

SENDER_LIFE_S = 3.0
# Each question is a message to the server and back: with 64 open requests, five a second for each took 6 % of omni_bls.
MAX_POLLS_PER_S = 64

T = TypeVar("T")
Encode = Callable[[Sequence[T]], Sequence[Sequence[Any]]]
"""Events that are ready together -> the tensors of each response."""
_Task: TypeAlias = "ResponseStream[Any] | Callable[[], None] | None"


def has_finish_reason(event: Any) -> bool:
    """How the events of thinker and talker say that they are the last."""
    return event.finish_reason is not None


def do_nothing() -> None:
    """For requests that are answered at once."""


class ResponseStream(Generic[T]):
    """The responses of one request on their way out; ends with exactly one FINAL. Made by ``Responder.open``."""

    def __init__(
        self,
        responder: Responder,
        sender: Any,
        encode: Encode[T],
        is_last: Callable[[T], bool],
        on_cancel: Callable[[], None],
        wakeup: str | None,
        is_sound: Callable[[T], bool] | None,
    ) -> None:
        self._responder = responder
        self._is_last = is_last
        self.wakeup = wakeup
        self._lock = threading.Lock()
        self._pending: list[T] = []
        self._error: OmniError | None = None
        self._final = False
        self._due_times = DueTimes(is_sound)
        self._due_s = AT_LAST  # of what is queued
        self.sender = sender
        self.encode = encode
        self.on_cancel = on_cancel
        self.begun = False
        self.ended = False
        self.broken = False  # an event is lost: nothing but the error may follow
        self.taken_back = False
        self.sign_of_life: T | None = None
        self.sign_every_s = self.sign_at = float("inf")
        self.poll_at = 0.0

    def sink(self, event: T | OmniError) -> None:
        """Takes an engine's events: the last one, or an error, ends the request."""
        if isinstance(event, OmniError):
            self.fail(event)
        else:
            self.send(event, final=self._is_last(event))

    @contextlib.contextmanager
    def guard(self, stage: str) -> Iterator[None]:
        """What is raised inside ends the request; an exception that is no OmniError as a StageError of ``stage``."""
        try:
            yield
        except OmniError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("a request of %s failed", stage)
            self.fail(StageError(stage, f"{type(error).__name__}: {error}"))

    def send(self, *events: T, final: bool = False) -> None:
        """Hand ``events`` over; what comes after ``final`` or an error is dropped."""
        with self._lock:
            if self._final:
                return
            self._pending.extend(events)
            self._final = final
            due_s = self._due_times.of(events)
            sooner, self._due_s = due_s < self._due_s, min(due_s, self._due_s)
        if sooner:
            self._responder.wake(self, due_s)

    def fail(self, error: OmniError) -> None:
        """End the request with a Triton error whose text is ``error.to_wire()``."""
        with self._lock:
            if self._final:
                return
            self._error, self._final = error, True
            due_s = time.monotonic()
            sooner, self._due_s = due_s < self._due_s, min(due_s, self._due_s)
        if sooner:
            self._responder.wake(self, due_s)

    def show_life(self, sign: T, every_s: float) -> None:
        """Send ``sign`` soon and then every so often, whatever else is sent: Triton does not tell when this process
        dies.
        """
        self.sign_of_life, self.sign_every_s, self.sign_at = sign, every_s, time.monotonic()

    def take(self) -> tuple[list[T], OmniError | None, bool]:
        """Everything that waits, for the responder."""
        with self._lock:
            pending, self._pending, self._due_s = self._pending, [], AT_LAST
            return pending, self._error, self._final


class Responder:
    """Starts its thread at once. ``poll_s``: how often each open request is asked whether its caller has left; less
    often when so many are open that it would be more than MAX_POLLS_PER_S. ``senders_may_wait``: a thread with an event
    sends it itself when nobody else is sending, which saves waking another one; not for the threads of engines.
    """

    def __init__(self, name: str, *, poll_s: float, senders_may_wait: bool = False) -> None:
        self._poll_s = poll_s
        self._senders_may_wait = senders_may_wait
        self._owner = threading.Lock()
        self._requests = self._responses = 0
        self._ready: DueQueue[_Task] = DueQueue()
        self._wakeups = WakeupWriter()
        self._asked: collections.deque[tuple[float, Any]] = collections.deque()
        self._opened: queue.SimpleQueue[ResponseStream[Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name}-responder", daemon=True)
        self._thread.start()

    def open(
        self,
        request: Any,
        encode: Encode[T],
        *,
        is_last: Callable[[T], bool] = has_finish_reason,
        on_cancel: Callable[[], None] = do_nothing,
        is_sound: Callable[[T], bool] | None = None,
    ) -> ResponseStream[T]:
        """A stream for ``request``. ``on_cancel`` is called once, from the responder's thread, when the caller has left
        or a response could not be sent; it must not block. After it the stream must still be ended.
        ``is_sound``: whether an event brings any; the first that do leave early.
        """
        parameter = json.loads(request.parameters() or "{}").get(PARAMETER)
        wakeup = parameter if is_target(parameter) else None  # any client may send it
        stream = ResponseStream(self, request.get_response_sender(), encode, is_last, on_cancel, wakeup, is_sound)
        self._requests += 1  # requests are opened by the one thread that runs execute()
        self._opened.put(stream)
        return stream

    def messages(self) -> dict[str, int]:
        """How many ``request`` and ``response`` messages there have been; a FINAL without tensors is a response."""
        return {"request": self._requests, "response": self._responses}

    def wake(self, stream: ResponseStream[Any], due_s: float) -> None:
        """``stream`` has something to send that is due at ``due_s``; again when there is something due sooner."""
        if self._senders_may_wait and self._owner.acquire(blocking=False):
            try:
                self._flush(stream)
            finally:
                self._owner.release()
        else:
            self._ready.put(stream, due_s)

    def close(self) -> None:
        """Send what was queued before this call, then end the thread."""
        self._ready.put(None, AT_LAST)
        self._thread.join()
        forget_constants()

    def _run(self) -> None:
        # Every stream is polled at about the same interval, so the one that waits longest is in front.
        polls: collections.deque[ResponseStream[Any]] = collections.deque()
        while True:
            wait_s = self._poll_s if not polls else max(0.0, polls[0].poll_at - time.monotonic())
            try:
                item = self._ready.get(timeout=wait_s)
            except queue.Empty:
                pass
            else:
                if item is None:
                    return
                if isinstance(item, ResponseStream):
                    with self._owner:
                        self._flush(item)
                else:
                    item()
            self._adopt(polls)
            self._poll(polls)

    def _adopt(self, polls: collections.deque[ResponseStream[Any]]) -> None:
        while not self._opened.empty():
            stream = self._opened.get()
            stream.poll_at = time.monotonic() + self._poll_s
            polls.append(stream)

    def _poll(self, polls: collections.deque[ResponseStream[Any]]) -> None:
        now = time.monotonic()
        while polls and polls[0].poll_at <= now:
            stream = polls.popleft()
            interval_s = self._poll_s
            with self._owner:
                if stream.ended:
                    continue
                if now >= stream.sign_at:
                    self._show_life(stream, now)
                if stream.wakeup is not None:
                    # omni_bls takes its requests back in-band, and Triton tells a child nothing of its caller's end.
                    has_left = not self._wake(stream, Record.ALIVE)
                else:
                    has_left = self._is_cancelled(stream)
                    interval_s = min(max(interval_s, len(polls) / MAX_POLLS_PER_S), stream.sign_every_s)
            if has_left:
                self._take_back(stream)
                continue
            stream.poll_at = now + interval_s
            polls.append(stream)

    def _show_life(self, stream: ResponseStream[Any], now: float) -> None:
        stream.sign_at = now + stream.sign_every_s
        if stream.broken:
            return
        try:
            [tensors] = stream.encode([stream.sign_of_life])
            self._send(stream, [pb_utils.InferenceResponse(output_tensors=list(tensors))], final=False)
        except Exception:
            logger.exception("a sign of life could not be sent")

    def _take_back(self, stream: ResponseStream[Any]) -> None:
        if stream.taken_back:
            return
        stream.taken_back = True
        try:
            stream.on_cancel()
        except Exception:
            logger.exception("a request could not be taken back")

    def _is_cancelled(self, stream: ResponseStream[Any]) -> bool:
        """The question lies in memory that belongs to the sender, and the server may still be at it when the answer is
        here: the sender must not go in that moment, or the server dies of a lock that is no more.
        """
        now = time.monotonic()
        self._asked.append((now, stream.sender))
        while now - self._asked[0][0] >= SENDER_LIFE_S:
            self._asked.popleft()
        try:
            return bool(stream.sender.is_cancelled())
        except Exception:
            logger.exception("a request could not be asked whether its caller has left")
            return False

    def _flush(self, stream: ResponseStream[Any]) -> None:
        events, error, final = stream.take()
        if stream.ended or stream.broken:
            return
        try:
            responses = [pb_utils.InferenceResponse(output_tensors=list(tensors)) for tensors in stream.encode(events)]
            if error is not None:
                responses.append(_error_response(stream, error, late=stream.begun or bool(responses)))
            self._send(stream, responses, final)
        except Exception as failure:
            logger.exception("a response could not be sent")
            stream.broken = True
            # Not here: this may be a thread that holds what ``on_cancel`` needs.
            self._ready.put(partial(self._end_failed, stream, StageError("response", str(failure))))

    def _end_failed(self, stream: ResponseStream[Any], error: OmniError) -> None:
        self._take_back(stream)
        with self._owner:
            if stream.ended:
                return
            try:
                self._send(stream, [_error_response(stream, error, late=stream.begun)], final=True)
            except Exception:
                logger.exception("a request could not be ended")

    def _send(self, stream: ResponseStream[Any], responses: Sequence[Any], final: bool) -> None:
        if stream.wakeup is not None and not self._wakeups.is_read(stream.wakeup):
            # Triton would wait for the dead omni_bls to take it, for ever, and this thread and all responses with it.
            stream.ended = True
            self._ready.put(partial(self._take_back, stream))
            return
        for response in responses[:-1] if final else responses:
            stream.begun = True
            self._responses += 1
            stream.sender.send(response)
            self._wake(stream, Record.RESPONSE)
        if final:
            stream.ended = True  # before the call: whatever it raises, nothing may follow
            self._responses += 1
            stream.sender.send(*responses[-1:], flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._wake(stream, Record.LAST_RESPONSE)

    def _wake(self, stream: ResponseStream[Any], record: Record) -> bool:
        """False when the omni_bls that waits for ``stream`` is gone."""
        return stream.wakeup is None or self._wakeups.write(stream.wakeup, record)


def _error_response(stream: ResponseStream[Any], error: OmniError, *, late: bool) -> Any:
    if late and stream.wakeup is not None:
        return pb_utils.InferenceResponse(output_tensors=late_error_tensors(error))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error.to_wire()))
