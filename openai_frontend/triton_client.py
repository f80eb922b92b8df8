"""The engine behind HTTP: omni_bls in a tritonserver, over gRPC streams.

Each request has a stream of its own; all share one channel. The messages are protobuf's own, without tritonclient's
wrappers: this path is taken some thousand times a second. No empty final responses are asked for: an answer ends with
its end event. A request whose client leaves is taken back by its CANCEL_KEY and its stream read to the end: cancelling
streams has crashed tritonserver, so that is only done when nothing else helps.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import orjson
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelReadyRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from openai_frontend.engine import Delta
from openai_frontend.errors import UnavailableError
from triton_omni.errors import (
    CapacityError,
    OmniError,
    RequestCancelledError,
    RequestTimeoutError,
    StageError,
    from_wire,
)

MODEL = "omni_bls"
THINKER = "thinker"
STAGES = (THINKER, "talker", "code2wav")
READY_TIMEOUT_S = 2.0
# How long Triton may take to close the stream of a request that is answered or was taken back.
LEAVE_TIMEOUT_S = 5.0
# Pieces that wait for a slow client before Triton is kept waiting too.
WAITING_PIECES = 64
_LENGTH_PREFIX_BYTES = 4  # before each element of a BYTES tensor
_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class _Reader:
    """Reads a stream in a task of its own, so that a consumer that leaves does not break off a read: the asyncio client
    would cancel the whole stream then.
    """

    def __init__(self, stream: Any) -> None:
        self.answered = False  # nothing more will come: the end event or an error is here, or the stream has broken
        self._stream = stream
        self._items: asyncio.Queue[Any] = asyncio.Queue(WAITING_PIECES)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while (response := await self._stream.read()) is not grpc.aio.EOF:
                await self._items.put(response)
        except grpc.RpcError as failure:
            await self._items.put(failure)
        else:
            await self._items.put(None)

    async def next(self, limit_s: float | None = None) -> Any:
        """A ModelStreamInferResponse; None when Triton has closed the stream. Raises grpc.RpcError, and TimeoutError
        when nothing comes within ``limit_s``.
        """
        if self._items.empty():  # else there is nothing to wait for, and no timer is set
            async with asyncio.timeout(limit_s):
                item = await self._items.get()
        else:
            item = self._items.get_nowait()
        if item is None or isinstance(item, grpc.RpcError):
            self.answered = True
        if isinstance(item, grpc.RpcError):
            raise item
        return item

    async def drain(self) -> None:
        """Read to the end; nobody waits for the pieces."""
        while not self._task.done() or not self._items.empty():
            if await self.next() is None:
                return

    def cancel(self) -> None:
        """Cancel the stream, if it has not ended."""
        self._task.cancel()
        self._stream.cancel()


class TritonEngine:
    """``url``: tritonserver's gRPC address; it need not answer yet. ``stall_timeout_s``: longest wait for a piece."""

    def __init__(self, url: str, *, stall_timeout_s: float, leave_timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        self._url = url
        self._stall_timeout_s = stall_timeout_s
        self._leave_timeout_s = leave_timeout_s
        self._connected: tuple[Any, Any] | None = None  # channel and stub
        self._leaving: set[asyncio.Task[None]] = set()

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        key = uuid.uuid4().hex
        inputs = {"REQUEST": [orjson.dumps(request)], "CANCEL_KEY": [key.encode()]}
        reader = self._stream(inputs | ({"MEDIA": media} if media else {}))
        try:
            while not reader.answered:  # Triton closes the stream later; the client need not wait for that
                piece = await self._next(reader)
                reader.answered = piece.event.get("type") == "end"
                yield piece
        finally:
            leaving = asyncio.create_task(self._leave(reader, key))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    def _stream(self, inputs: Mapping[str, Sequence[bytes]], model: str = MODEL) -> _Reader:
        return _Reader(self._stub().ModelStreamInfer(_once(_request(model, inputs))))

    async def _leave(self, reader: _Reader, key: str) -> None:
        """Read a stream to its end, and take its request back if that is not answered yet."""
        readers = [reader]
        if not reader.answered:
            readers.append(self._stream({"REQUEST": [b""], "CANCEL_KEY": [key.encode()]}))
        try:
            with contextlib.suppress(TimeoutError, grpc.RpcError):
                async with asyncio.timeout(self._leave_timeout_s):
                    await asyncio.gather(*(each.drain() for each in readers))
        finally:
            for each in readers:
                each.cancel()

    async def _next(self, reader: _Reader) -> Delta:
        try:
            response = await reader.next(self._stall_timeout_s)
        except (TimeoutError, grpc.RpcError) as failure:
            raise self._translated(failure) from failure
        if response is None:
            raise StageError(MODEL, "the answer broke off without its end event")
        if response.error_message:
            reader.answered = True
            raise _from_triton(response.error_message)
        return _delta(response.infer_response)

    def _translated(self, failure: TimeoutError | grpc.RpcError) -> OmniError:
        if isinstance(failure, TimeoutError):
            return RequestTimeoutError(f"nothing came from {MODEL} for {self._stall_timeout_s:g} s")
        if failure.code() == grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"tritonserver at {self._url} does not answer")
        return _from_triton(failure.details() or failure.code().name)

    async def waiting_for(self) -> list[str]:
        names = (MODEL, *STAGES)
        try:
            stub = self._stub()
            checks = (stub.ModelReady(ModelReadyRequest(name=name), timeout=READY_TIMEOUT_S) for name in names)
            answers = await asyncio.gather(*checks)
        except grpc.RpcError:
            return [f"tritonserver at {self._url}"]
        waiting = [name for name, answer in zip(names, answers, strict=True) if not answer.ready]
        if THINKER not in waiting and not await self._thinker_answers():
            waiting.append(THINKER)
        return waiting

    async def _thinker_answers(self) -> bool:
        """Asked because a tritonserver before 26.04 calls a model ready whose process is gone, and this one ends its
        process when its engine has lost its own. Taking back what never was costs it nothing.
        """
        nobody = orjson.dumps({"op": "cancel", "request_id": uuid.uuid4().hex})
        reader = self._stream({"REQUEST": [nobody]}, THINKER)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (response := await reader.next()) is not None:
                    if response.error_message:
                        return False
            return True
        except (TimeoutError, grpc.RpcError):
            return False
        finally:
            reader.cancel()

    async def close(self) -> None:
        await asyncio.gather(*self._leaving)
        if self._connected is not None:
            await self._connected[0].close()

    def _stub(self) -> Any:
        """Made at the first call: a channel belongs to the event loop that runs then."""
        if self._connected is None:
            channel = grpc.aio.insecure_channel(self._url, options=_ANY_SIZE)
            self._connected = (channel, GRPCInferenceServiceStub(channel))
        return self._connected[1]


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


def _request(model: str, inputs: Mapping[str, Sequence[bytes]]) -> Any:
    """A ModelInferRequest with BYTES tensors."""
    request = ModelInferRequest(model_name=model)
    for name, values in inputs.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
        elements = (len(value).to_bytes(_LENGTH_PREFIX_BYTES, "little") + value for value in values)
        request.raw_input_contents.append(b"".join(elements))
    return request


def _delta(response: Any) -> Delta:
    """TEXT, AUDIO and EVENT of a response, straight from its raw contents."""
    raw = {out.name: data for out, data in zip(response.outputs, response.raw_output_contents, strict=True)}
    return Delta(
        text=raw["TEXT"][_LENGTH_PREFIX_BYTES:].decode("utf-8"),
        audio=raw["AUDIO"],
        event=orjson.loads(raw["EVENT"][_LENGTH_PREFIX_BYTES:]),
    )


def _from_triton(message: str) -> OmniError:
    """An error of ours as it was, or Triton's own in our words."""
    error = from_wire(message, stage=MODEL)
    if not isinstance(error, StageError) or error.field != MODEL:
        return error
    lowered = message.lower()
    if "maximum queue size" in lowered or "resource_exhausted" in lowered:
        return CapacityError("no room for another request at the moment; try again")
    if "is not ready" in lowered or "unknown model" in lowered or "is not found" in lowered:
        return UnavailableError(f"{MODEL} is not ready: {message}")
    if "cancelled" in lowered:
        return RequestCancelledError(message)
    return error
