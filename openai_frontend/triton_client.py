"""The engine behind HTTP: omni_bls in a tritonserver, over gRPC streams.

Each request has a stream of its own; all share one channel. The asyncio client cannot ask Triton for empty final
responses: an answer ends with its end event. A request whose client leaves is taken back by its CANCEL_KEY and its
stream read to the end: cancelling streams has crashed tritonserver, so that is only done when nothing else helps.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import orjson
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

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
# How long Triton may take to close a stream whose end event is here; the answer is complete either way.
CLOSE_TIMEOUT_S = 5.0
# How long a request that was taken back may take to end by itself.
LEAVE_TIMEOUT_S = 5.0
# Pieces that wait for a slow client before Triton is kept waiting too.
WAITING_PIECES = 64
_LENGTH_PREFIX_BYTES = 4  # before each element of a BYTES tensor


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
            async for item in self._stream:
                await self._items.put(item)
        except grpc.RpcError as failure:
            await self._items.put(failure)
        else:
            await self._items.put(None)

    async def next(self) -> tuple[Any, Any] | None:
        """A result and an error, one of them None; None when Triton has closed the stream. Raises grpc.RpcError."""
        item: tuple[Any, Any] | grpc.RpcError | None = await self._items.get()
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
        self._connected: Any = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        key = uuid.uuid4().hex
        inputs = [_strings("REQUEST", [orjson.dumps(request)]), _strings("CANCEL_KEY", [key.encode()])]
        if media:
            inputs.append(_strings("MEDIA", media))
        reader = self._stream(inputs)
        try:
            ended = False
            while (piece := await self._next(reader, ended)) is not None:
                ended = reader.answered = piece.event.get("type") == "end"
                yield piece
            if not ended:
                raise StageError(MODEL, "the answer broke off without its end event")
        finally:
            leaving = asyncio.create_task(self._leave(reader, key))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    def _stream(self, inputs: Sequence[Any], model: str = MODEL) -> _Reader:
        return _Reader(self._client().stream_infer(_once({"model_name": model, "inputs": list(inputs)})))

    async def _leave(self, reader: _Reader, key: str) -> None:
        """Read a stream to its end, and take its request back if that is not answered yet."""
        readers = [reader]
        if not reader.answered:
            readers.append(self._stream([_strings("REQUEST", [b""]), _strings("CANCEL_KEY", [key.encode()])]))
        try:
            with contextlib.suppress(TimeoutError, grpc.RpcError):
                async with asyncio.timeout(self._leave_timeout_s):
                    await asyncio.gather(*(each.drain() for each in readers))
        finally:
            for each in readers:
                each.cancel()

    async def _next(self, reader: _Reader, ended: bool) -> Delta | None:
        """The next piece; None when Triton has closed the stream."""
        limit_s = CLOSE_TIMEOUT_S if ended else self._stall_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                item = await reader.next()
        except (TimeoutError, grpc.RpcError) as failure:
            if ended:
                return None
            raise self._translated(failure, limit_s) from failure
        if item is None:
            return None
        result, error = item
        if error is not None:
            reader.answered = True
            raise _from_triton(error.message())
        return _delta(result.get_response())

    def _translated(self, failure: TimeoutError | grpc.RpcError, limit_s: float) -> OmniError:
        if isinstance(failure, TimeoutError):
            return RequestTimeoutError(f"nothing came from {MODEL} for {limit_s:g} s")
        if failure.code() == grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"tritonserver at {self._url} does not answer")
        return _from_triton(failure.details() or failure.code().name)

    async def waiting_for(self) -> list[str]:
        names = (MODEL, *STAGES)
        try:
            client = self._client()
            checks = (client.is_model_ready(name, client_timeout=READY_TIMEOUT_S) for name in names)
            ready = await asyncio.gather(*checks)
        except InferenceServerException:
            return [f"tritonserver at {self._url}"]
        waiting = [name for name, is_ready in zip(names, ready, strict=True) if not is_ready]
        if THINKER not in waiting and not await self._thinker_answers():
            waiting.append(THINKER)
        return waiting

    async def _thinker_answers(self) -> bool:
        """Asked because a tritonserver before 26.04 calls a model ready whose process is gone, and this one ends its
        process when its engine has lost its own. Taking back what never was costs it nothing.
        """
        nobody = orjson.dumps({"op": "cancel", "request_id": uuid.uuid4().hex})
        reader = self._stream([_strings("REQUEST", [nobody])], THINKER)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (item := await reader.next()) is not None:
                    if item[1] is not None:
                        return False
            return True
        except (TimeoutError, grpc.RpcError):
            return False
        finally:
            reader.cancel()

    async def close(self) -> None:
        await asyncio.gather(*self._leaving)
        if self._connected is not None:
            await self._connected.close()

    def _client(self) -> Any:
        """Made at the first call: a channel belongs to the event loop that runs then."""
        if self._connected is None:
            self._connected = InferenceServerClient(self._url)
        return self._connected


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _strings(name: str, values: Sequence[bytes]) -> Any:
    tensor = InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object))
    return tensor


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
