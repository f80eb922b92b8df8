"""omni_bls itself, without the frontend: a ModelStreamInfer stream per request over one channel."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import orjson
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_omni.bench.record import Record, Recorder
from triton_omni.model_config import SAMPLE_RATE_HZ

MODEL = "omni_bls"
SAMPLE_BYTES = 2
_LENGTH_PREFIX_BYTES = 4  # before each element of a BYTES tensor
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcTarget:
    """``url``: tritonserver's gRPC address, host:port. ``timeout_s``: longest that an answer may take."""

    def __init__(self, url: str, *, timeout_s: float = 300.0, wants_text: bool, wants_audio: bool) -> None:
        self._url = url.removeprefix("grpc://")
        self._timeout_s = timeout_s
        self._wants = {"wants_text": wants_text, "wants_audio": wants_audio}
        self._connected: tuple[Any, Any] | None = None  # channel and stub
        self._closing: set[Any] = set()

    async def ask(self, body: Mapping[str, Any], late_s: float) -> Record:
        """One request from start to end; what goes wrong stands in the record."""
        if self._connected is None:
            channel = grpc.aio.insecure_channel(self._url, options=_OPTIONS)
            self._connected = (channel, GRPCInferenceServiceStub(channel))
        request = _request(body)
        answer = Recorder(time.monotonic(), late_s)
        try:
            stream = self._connected[1].ModelStreamInfer(_once(request), timeout=self._timeout_s)
            while not answer.ended and (response := await stream.read()) is not grpc.aio.EOF:
                take_response(response, time.monotonic() - answer.sent_s, answer)
            self._closing.add(asyncio.ensure_future(self._drain(stream)))
        except grpc.RpcError as error:
            answer.fail(f"{error.code().name}: {error.details()}")
        return answer.close(time.monotonic(), **self._wants)

    async def _drain(self, stream: Any) -> None:
        """Triton closes a stream after the answer's end, which is what an HTTP client sees; nobody waits for it."""
        with contextlib.suppress(grpc.RpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        self._closing.discard(asyncio.current_task())

    async def close(self) -> None:
        await asyncio.gather(*self._closing)
        if self._connected is not None:
            await self._connected[0].close()


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


def _request(body: Mapping[str, Any]) -> Any:
    text = orjson.dumps(body)
    request = ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="REQUEST", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(text).to_bytes(_LENGTH_PREFIX_BYTES, "little") + text)
    return request


def take_response(response: Any, now_s: float, answer: Recorder) -> None:
    """One ModelStreamInferResponse."""
    if response.error_message:
        answer.fail(response.error_message)
        return
    outputs = response.infer_response
    raw = {out.name: data for out, data in zip(outputs.outputs, outputs.raw_output_contents, strict=True)}
    if "EVENT" not in raw:
        return
    answer.event(now_s)
    event = orjson.loads(raw["EVENT"][_LENGTH_PREFIX_BYTES:])
    usage = event.get("usage") or {}
    if len(raw["TEXT"]) > _LENGTH_PREFIX_BYTES:
        answer.text(now_s, usage.get("text_tokens"))
    if raw["AUDIO"]:
        answer.audio(now_s, len(raw["AUDIO"]) / (SAMPLE_BYTES * SAMPLE_RATE_HZ))
    if event.get("type") == "end":
        answer.ended = True
        answer.usage(usage["prompt_tokens"], usage["text_tokens"])
