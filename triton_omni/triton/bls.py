"""The stages as omni_bls reaches them: child requests to the other three models through Triton.

Always ``exec(decoupled=True)``, never ``async_exec``, and CPU tensors only. A call returns with the child's first
response; later ones are read from an iterator that blocks without holding the GIL.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_omni.errors import CapacityError, OmniError, StageError, from_wire
from triton_omni.pipeline.chunk_policy import DEFAULT_CHUNK_FRAMES
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
from triton_omni.triton.tensors import Arrays, arrays

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class BlsConfig:
    """What omni_bls can be told beside PipelineConfig: how requests are handed on that do not say it themselves, and
    the names of the three models it calls.
    """

    chunk_frames: tuple[int, ...] = DEFAULT_CHUNK_FRAMES
    async_chunk: bool = True
    thinker_model: str = "thinker"
    talker_model: str = "talker"
    code2wav_model: str = "code2wav"


ITERATOR_LIFE_S = 3.0
_START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


class ChildRequests:
    """Sends requests to the other models of this server and reads their responses."""

    def __init__(self) -> None:
        self._ended = EndedIterators()

    def stream(
        self,
        model: str,
        inputs: Sequence[Any],
        outputs: Sequence[str],
        *,
        request_id: str,
        correlation_id: str = "",
        flags: int = 0,
    ) -> Iterator[Arrays]:
        """Send now, wait for the first response, and return an iterator over all of them (the empty last one left out).

        Raises (here and from the iterator): the OmniError that the model sent.
        """
        sequence = {"correlation_id": correlation_id} if correlation_id else {}
        request = pb_utils.InferenceRequest(
            request_id=request_id,
            model_name=model,
            inputs=list(inputs),
            requested_output_names=list(outputs),
            flags=flags,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
            **sequence,
        )
        try:
            iterator = request.exec(decoupled=True)
        except pb_utils.TritonModelException as error:
            raise _error(model, str(error)) from None
        return self._read(model, iterator)

    def call(self, model: str, inputs: Sequence[Any], outputs: Sequence[str], **options: Any) -> list[Arrays]:
        """As ``stream``, with all responses."""
        return list(self.stream(model, inputs, outputs, **options))

    def _read(self, model: str, iterator: Any) -> Iterator[Arrays]:
        ended = False
        try:
            for response in iterator:
                if response.has_error():
                    raise _error(model, response.error().message())
                if tensors := response.output_tensors():
                    yield arrays(tensors)
            ended = True
        finally:
            if not ended:
                # Its destructor would wait for the responses that are left, in whichever thread it happens to run.
                threading.Thread(target=self._drain, args=(iterator,), name="omni-drain", daemon=True).start()
            else:
                self._ended.keep(iterator)

    def _drain(self, iterator: Any) -> None:
        for _ in iterator:
            pass
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

    def keep(self, iterator: Any) -> None:
        """Let go of ``iterator`` with the first call that comes ``life_s`` or more from now."""
        now = time.monotonic()
        expired = []
        with self._lock:
            self._kept.append((now, iterator))
            while now - self._kept[0][0] >= self._life_s:
                expired.append(self._kept.popleft())


class BlsThinker:
    """ThinkerStage through Triton."""

    def __init__(self, children: ChildRequests, model: str) -> None:
        self._children = children
        self._model = model

    def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]:
        responses = self._children.stream(
            self._model,
            thinker_wire.generate_tensors(request),
            thinker_wire.GENERATE_OUTPUTS,
            request_id=request.request_id,
        )
        return map(thinker_wire.read_event, responses)

    def rows(self, request_id: str) -> PromptRows:
        inputs = thinker_wire.op_tensors("rows", request_id)
        responses = self._children.call(self._model, inputs, thinker_wire.ROWS_OUTPUTS, request_id=request_id)
        if not responses:
            raise StageError(self._model, "gave no rows")
        return thinker_wire.read_rows(responses[0])

    def cancel(self, request_id: str) -> None:
        inputs = thinker_wire.op_tensors("cancel", request_id)
        self._children.call(self._model, inputs, thinker_wire.GENERATE_OUTPUTS, request_id=request_id)


class BlsTalker:
    """TalkerStage through Triton. A session's first response is an acknowledgement without frames."""

    def __init__(self, children: ChildRequests, model: str) -> None:
        self._children = children
        self._model = model

    def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]:
        responses = self._children.stream(
            self._model,
            talker_wire.start_tensors(start),
            talker_wire.OUTPUTS,
            request_id=session_id,
            correlation_id=session_id,
            flags=_START,
        )
        events = map(talker_wire.read_codes, responses)
        return (event for event in events if event.codes.shape[0] or event.finish_reason)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        self._request(session_id, talker_wire.append_tensors(token_ids, text_finished), 0)

    def end(self, session_id: str, *, cancel: bool) -> None:
        self._request(
            session_id, talker_wire.cancel_tensors() if cancel else talker_wire.append_tensors(NO_IDS, True), _END
        )

    def _request(self, session_id: str, inputs: Sequence[Any], flags: int) -> None:
        self._children.call(
            self._model,
            inputs,
            talker_wire.OUTPUTS,
            request_id=session_id,
            correlation_id=session_id,
            flags=flags,
        )


class BlsCode2Wav:
    """Code2WavStage through Triton."""

    def __init__(self, children: ChildRequests, model: str) -> None:
        self._children = children
        self._model = model

    def decode(self, chunk: CodesChunk) -> Int16:
        responses = self._children.call(
            self._model,
            code2wav_wire.chunk_tensors(chunk),
            code2wav_wire.OUTPUTS,
            request_id=chunk.session_id,
            correlation_id=chunk.session_id,
            flags=(_START if chunk.start else 0) | (_END if chunk.end else 0),
        )
        if not responses:
            raise StageError(self._model, "gave no audio")
        return code2wav_wire.read_audio(responses[0])


def _error(model: str, text: str) -> OmniError:
    if "exceeds maximum queue size" in text.lower():  # Triton's own words, from the model's queue policy
        return CapacityError(f"the {model}'s queue is full")
    return from_wire(text, stage=model)
