"""The engine behind HTTP: omni_bls in a tritonserver, over gRPC streams.

Triton cancels everything in a stream that is cancelled, so each request has a stream of its own; all share one channel.
The asyncio client cannot ask Triton for empty final responses: an answer ends with its end event.
"""

from __future__ import annotations

import asyncio
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
STAGES = ("thinker", "talker", "code2wav")
READY_TIMEOUT_S = 2.0
# How long Triton may take to close a stream whose end event is here; the answer is complete either way.
CLOSE_TIMEOUT_S = 5.0
_LENGTH_PREFIX_BYTES = 4  # before each element of a BYTES tensor


class TritonEngine:
    """``url``: tritonserver's gRPC address; it need not answer yet. ``stall_timeout_s``: longest wait for a piece."""

    def __init__(self, url: str, *, stall_timeout_s: float) -> None:
        self._url = url
        self._stall_timeout_s = stall_timeout_s
        self._connected: Any = None

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        inputs = [_strings("REQUEST", [orjson.dumps(request)])]
        if media:
            inputs.append(_strings("MEDIA", media))
        stream = self._client().stream_infer(_once({"model_name": MODEL, "inputs": inputs}))
        ended = False
        try:
            while (piece := await self._next(stream, ended)) is not None:
                ended = piece.event.get("type") == "end"
                yield piece
            if not ended:
                raise StageError(MODEL, "the answer broke off without its end event")
        finally:
            stream.cancel()

    async def _next(self, stream: Any, ended: bool) -> Delta | None:
        """The next piece; None when Triton has closed the stream."""
        limit_s = CLOSE_TIMEOUT_S if ended else self._stall_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                result, error = await anext(stream)
        except StopAsyncIteration:
            return None
        except (TimeoutError, grpc.RpcError) as failure:
            if ended:
                return None
            raise self._translated(failure, limit_s) from failure
        if error is not None:
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
        return [name for name, is_ready in zip(names, ready, strict=True) if not is_ready]

    async def close(self) -> None:
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
