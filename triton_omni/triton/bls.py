"""The stages as omni_bls reaches them: child requests to the other three models through Triton.

Always ``exec(decoupled=True)``, never ``async_exec``, and CPU tensors only. A call returns with the child's first
response; ``wakeups`` says when later ones can be read.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_omni.errors import CapacityError, OmniError, StageError, from_wire
from triton_omni.pipeline.stages import (
    NO_IDS,
    CodesChunk,
    CodesEvent,
    Int16,
    Int32,
    PromptRows,
    TalkerStart,
    ThinkerEvent,
    ThinkerRequest,
)
from triton_omni.triton import code2wav_wire, talker_wire, thinker_wire
from triton_omni.triton.dead_replicas import DeadReplicaError, Sequences, opened
from triton_omni.triton.late_errors import raise_late_error
from triton_omni.triton.tensors import Arrays, arrays
from triton_omni.triton.wakeups import PARAMETER, Arrivals, WakeupReader

logger = logging.getLogger(__name__)


ITERATOR_LIFE_S = 3.0
_START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


class ChildRequests:
    """Sends requests to the other models of this server and reads their responses."""

    def __init__(self, wakeups: WakeupReader) -> None:
        self._wakeups = wakeups
        self._ended = EndedIterators()

    def call(self, model: str, inputs: Sequence[Any], outputs: Sequence[str], **options: Any) -> Arrays:
        """Send a request that gets one response, and wait for it; {} when it is empty.

        Raises: the OmniError that the model sent.
        """
        iterator = self._exec(model, inputs, outputs, **options)
        try:
            return _read(model, next(iterator))
        finally:
            self._ended.keep(iterator)

    def stream(self, model: str, inputs: Sequence[Any], outputs: Sequence[str], **options: Any) -> Iterator[Arrays]:
        """Send now, wait for the first response, and return an iterator over all of them, the empty one left out.

        Raises (here and from the iterator): the OmniError that the model sent.
        """
        key, arrivals = self._wakeups.open(model)
        try:
            parameters = {PARAMETER: arrivals.parameter}
            iterator = self._exec(model, inputs, outputs, parameters=parameters, **options)
            first = next(iterator)
        except BaseException:
            self._wakeups.forget(key)
            raise
        if first.has_error():  # nothing follows an error
            self._finish(iterator, key)
        return self._responses(model, iterator, arrivals, key, _read(model, first))

    def _exec(self, model: str, inputs: Sequence[Any], outputs: Sequence[str], **options: Any) -> Any:
        request = pb_utils.InferenceRequest(
            model_name=model,
            inputs=list(inputs),
            requested_output_names=list(outputs),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
            **options,
        )
        try:
            return request.exec(decoupled=True)
        except pb_utils.TritonModelException as error:
            raise _error(model, str(error)) from None

    def _responses(self, model: str, iterator: Any, arrivals: Arrivals, key: bytes, first: Arrays) -> Iterator[Arrays]:
        read, ended = 1, False
        try:
            if first:
                yield first
            while arrivals.wait(read + 1):
                response = next(iterator)
                read += 1
                ended = response.has_error()
                if tensors := _read(model, response):
                    yield tensors
            ended = True
        finally:
            if ended:
                self._finish(iterator, key)
            else:
                # The responses that are still to come must be taken, or the iterator's destructor waits for them, in
                # whichever thread it happens to run.
                work = partial(self._drain, iterator, arrivals, key, read)
                threading.Thread(target=work, name="omni-drain", daemon=True).start()

    def _drain(self, iterator: Any, arrivals: Arrivals, key: bytes, read: int) -> None:
        try:
            while arrivals.wait(read + 1):
                next(iterator)
                read += 1
        except StageError as error:
            logger.warning("a response stream of %s is given up: %s", error.field, error.message)
            self._ended.keep_for_good(iterator)
        self._finish(iterator, key)

    def _finish(self, iterator: Any, key: bytes) -> None:
        self._wakeups.forget(key)
        self._ended.keep(iterator)


class EndedIterators:
    """Keeps response iterators alive for a while after their last response.

    When a stream has ended, a native thread of the stub lets go of its share of the iterator without holding the GIL.
    If Python has let go before, the iterator and its tensors are destroyed there: a crash of the whole process.
    """

    def __init__(self, life_s: float = ITERATOR_LIFE_S) -> None:
        self._life_s = life_s
        self._lock = threading.Lock()
        self._kept: collections.deque[tuple[float, Any]] = collections.deque()
        self._endless: list[Any] = []

    def keep(self, iterator: Any) -> None:
        """Let go of ``iterator`` with the first call that comes ``life_s`` or more from now."""
        now = time.monotonic()
        expired = []
        with self._lock:
            self._kept.append((now, iterator))
            while now - self._kept[0][0] >= self._life_s:
                expired.append(self._kept.popleft())

    def keep_for_good(self, iterator: Any) -> None:
        """For one that will never end: its destructor would never return."""
        with self._lock:
            self._endless.append(iterator)


class BlsThinker:
    """ThinkerStage through Triton."""

    def __init__(self, children: ChildRequests, model: str) -> None:
        self._children = children
        self._model = model

    def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]:
        responses = opened(
            self._model,
            lambda _: self._children.stream(
                self._model,
                thinker_wire.generate_tensors(request),
                thinker_wire.GENERATE_OUTPUTS,
                request_id=request.request_id,
            ),
        )
        return map(thinker_wire.read_event, responses)

    def rows(self, request_id: str) -> PromptRows:
        inputs = thinker_wire.op_tensors("rows", request_id)
        response = self._children.call(self._model, inputs, thinker_wire.ROWS_OUTPUTS, request_id=request_id)
        return thinker_wire.read_rows(response)

    def cancel(self, request_id: str) -> None:
        inputs = thinker_wire.op_tensors("cancel", request_id)
        self._children.call(self._model, inputs, thinker_wire.GENERATE_OUTPUTS, request_id=request_id)


class BlsTalker:
    """TalkerStage through Triton. A session's first response is an acknowledgement without frames."""

    def __init__(self, children: ChildRequests, model: str) -> None:
        self._children = children
        self._model = model
        self._sequences = Sequences()

    def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]:
        responses = opened(
            self._model,
            lambda number: self._children.stream(
                self._model,
                talker_wire.start_tensors(start),
                talker_wire.OUTPUTS,
                request_id=session_id,
                correlation_id=self._sequences.rename(session_id, number),
                flags=_START,
            ),
        )
        events = map(talker_wire.read_codes, responses)
        return (event for event in events if event.codes.shape[0] or event.finish_reason)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        self._request(session_id, talker_wire.append_tensors(token_ids, text_finished), 0)

    def end(self, session_id: str, *, cancel: bool) -> None:
        inputs = talker_wire.cancel_tensors() if cancel else talker_wire.append_tensors(NO_IDS, True)
        try:
            self._request(session_id, inputs, _END)
        finally:
            self._sequences.end(session_id)

    def _request(self, session_id: str, inputs: Sequence[Any], flags: int) -> None:
        self._children.call(
            self._model,
            inputs,
            talker_wire.OUTPUTS,
            request_id=session_id,
            correlation_id=self._sequences.of(session_id),
            flags=flags,
        )


class BlsCode2Wav:
    """Code2WavStage through Triton."""

    def __init__(self, children: ChildRequests, model: str) -> None:
        self._children = children
        self._model = model
        self._sequences = Sequences()

    def decode(self, chunk: CodesChunk) -> Int16:
        try:
            if not chunk.start:
                return self._decode(chunk, self._sequences.of(chunk.session_id))
            return opened(
                self._model,
                lambda number: self._decode(chunk, self._sequences.rename(chunk.session_id, number)),
            )
        finally:
            if chunk.end:
                self._sequences.end(chunk.session_id)

    def _decode(self, chunk: CodesChunk, correlation_id: str) -> Int16:
        response = self._children.call(
            self._model,
            code2wav_wire.chunk_tensors(chunk),
            code2wav_wire.OUTPUTS,
            request_id=chunk.session_id,
            correlation_id=correlation_id,
            flags=(_START if chunk.start else 0) | (_END if chunk.end else 0),
        )
        return code2wav_wire.read_audio(response)


def _read(model: str, response: Any) -> Arrays:
    if response.has_error():
        raise _error(model, response.error().message())
    outputs = arrays(response.output_tensors())
    raise_late_error(model, outputs)
    return outputs


def _error(model: str, text: str) -> OmniError:
    if "exceeds maximum queue size" in text.lower():  # Triton's own words, from the model's queue policy
        return CapacityError(f"the {model}'s queue is full")
    if "is not healthy" in text:  # and the Python backend's
        return DeadReplicaError(model, f"the process that served this request died ({text})")
    return from_wire(text, stage=model)
