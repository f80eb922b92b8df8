"""The engine behind HTTP: omni_bls in a tritonserver, over gRPC streams.

Each request has a stream of its own; all share one channel (``rpc``). The messages are protobuf's own, without
tritonclient's wrappers: this path is taken some thousand times a second. No empty final responses are asked for: an
answer ends with its end event. A request whose client leaves is taken back by its CANCEL_KEY and its stream read to the
end: cancelling streams has crashed tritonserver, so that is only done when nothing else helps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import orjson
from grpc import StatusCode
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelStreamInferResponse,
)

from openai_frontend.engine import Delta
from openai_frontend.errors import UnavailableError
from openai_frontend.rpc.call import Call, RpcError
from openai_frontend.rpc.channel import Channel
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
# omni_bls is asked for a sign of life every so often. Two silences in a row, the second counted anew because a machine
# that stood still is none, mean that its process is gone: Triton neither tells nor ends the stream.
LIFE_EVERY_S = 2
SILENCE_S = 6.0
_LENGTH_PREFIX_BYTES = 4  # before each element of a BYTES tensor
_LIFE_PARAMETER = "sign_of_life_s"
_LIFE_BYTES = 2 * _LENGTH_PREFIX_BYTES + len("{}")  # no text, no audio, no event
_SERVICE = "/inference.GRPCInferenceService"


@dataclasses.dataclass(slots=True)
class _Life:
    """``shown``: its first sign of life has come over a stream. Before that the request may be on its way still."""

    shown: bool = False


class TritonEngine:
    """``url``: tritonserver's gRPC address, HOST:PORT; it need not answer yet. ``stall_timeout_s``: longest wait for a
    piece. Raises: ConfigError.
    """

    def __init__(self, url: str, *, stall_timeout_s: float, leave_timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        self._url = url
        self._stall_timeout_s = stall_timeout_s
        self._leave_timeout_s = leave_timeout_s
        self._channel = Channel(url)

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        key = uuid.uuid4().hex.encode()
        inputs: dict[str, Sequence[bytes]] = {"REQUEST": [orjson.dumps(request)], "CANCEL_KEY": [key]}
        if media:
            inputs["MEDIA"] = media
        message = _request(MODEL, inputs, {_LIFE_PARAMETER: LIFE_EVERY_S})
        call = self._call(message, min(SILENCE_S, self._stall_timeout_s))
        life = _Life()
        answered = False  # Triton closes the stream later; nobody need wait for that
        try:
            while not answered:
                response = await self._next(call, life)
                answered = bool(response.error_message)
                piece = _delta(response)
                answered = piece.event.get("type") == "end"
                yield piece
        finally:
            if not answered and not call.ended.is_set():
                self._stream(MODEL, {"REQUEST": [b""], "CANCEL_KEY": [key]}).leave(self._leave_timeout_s)
            call.leave(self._leave_timeout_s)

    def _stream(self, model: str, inputs: Mapping[str, Sequence[bytes]], stall_timeout_s: float | None = None) -> Call:
        return self._call(_request(model, inputs), stall_timeout_s or self._stall_timeout_s)

    def _call(self, request: Any, stall_timeout_s: float) -> Call:
        message = request.SerializeToString()
        return self._channel.call(f"{_SERVICE}/ModelStreamInfer", message, stall_timeout_s=stall_timeout_s)

    async def _next(self, call: Call, life: _Life) -> Any:
        """The next ModelStreamInferResponse that is more than a sign of life."""
        loop = asyncio.get_running_loop()
        asked_s, silences = loop.time(), 0
        while True:
            try:
                message = await call.next()
            except TimeoutError:
                silences += 1
                if life.shown and silences > 1:
                    silent_s = silences * SILENCE_S
                    raise StageError(
                        MODEL, f"nothing was heard of it for {silent_s:g} s; its process may have died"
                    ) from None
            except RpcError as failure:
                raise self._translated(failure) from failure
            else:
                if message is None:
                    raise StageError(MODEL, "the answer broke off without its end event")
                response = ModelStreamInferResponse.FromString(message)
                if not _is_sign_of_life(response):
                    return response
                life.shown, silences = True, 0
            if loop.time() - asked_s >= self._stall_timeout_s:
                raise RequestTimeoutError(f"nothing came from {MODEL} for {self._stall_timeout_s:g} s")

    def _translated(self, failure: RpcError) -> OmniError:
        if failure.code is StatusCode.UNAVAILABLE:
            return UnavailableError(f"tritonserver at {self._url} does not answer")
        return _from_triton(failure.details or failure.code.name)

    async def waiting_for(self) -> list[str]:
        names = (MODEL, *STAGES)
        try:
            ready = await asyncio.gather(*(self._is_ready(name) for name in names))
        except (TimeoutError, RpcError):
            return [f"tritonserver at {self._url}"]
        waiting = [name for name, is_ready in zip(names, ready, strict=True) if not is_ready]
        if THINKER not in waiting and not await self._thinker_answers():
            waiting.append(THINKER)
        return waiting

    async def _is_ready(self, model: str) -> bool:
        message = ModelReadyRequest(name=model).SerializeToString()
        call = self._channel.call(f"{_SERVICE}/ModelReady", message, stall_timeout_s=READY_TIMEOUT_S)
        try:
            answer = await call.next()
            return answer is not None and bool(ModelReadyResponse.FromString(answer).ready)
        finally:
            call.leave(READY_TIMEOUT_S)

    async def _thinker_answers(self) -> bool:
        """Asked because a tritonserver before 26.04 calls a model ready whose process is gone, and this one ends its
        process when its engine has lost its own. Taking back what never was costs it nothing.
        """
        nobody = orjson.dumps({"op": "cancel", "request_id": uuid.uuid4().hex})
        call = self._stream(THINKER, {"REQUEST": [nobody]}, READY_TIMEOUT_S)
        try:
            while (message := await call.next()) is not None:
                if ModelStreamInferResponse.FromString(message).error_message:
                    return False
            return True
        except (TimeoutError, RpcError):
            return False
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def _is_sign_of_life(response: Any) -> bool:
    return not response.error_message and sum(map(len, response.infer_response.raw_output_contents)) == _LIFE_BYTES


def _request(model: str, inputs: Mapping[str, Sequence[bytes]], parameters: Mapping[str, int] | None = None) -> Any:
    """A ModelInferRequest with BYTES tensors."""
    request = ModelInferRequest(model_name=model)
    for name, number in (parameters or {}).items():
        request.parameters[name].int64_param = number
    for name, values in inputs.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
        elements = (len(value).to_bytes(_LENGTH_PREFIX_BYTES, "little") + value for value in values)
        request.raw_input_contents.append(b"".join(elements))
    return request


def _delta(response: Any) -> Delta:
    """TEXT, AUDIO and EVENT, straight from the raw contents. Raises: the OmniError that came instead."""
    if response.error_message:
        raise _from_triton(response.error_message)
    outputs = response.infer_response
    raw = {out.name: data for out, data in zip(outputs.outputs, outputs.raw_output_contents, strict=True)}
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
