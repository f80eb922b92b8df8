"""TritonEngine against a gRPC server that speaks KServe's protocol and answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from openai_frontend import triton_client
from openai_frontend.errors import UnavailableError
from openai_frontend.triton_client import TritonEngine
from tests.openai_frontend.fakes import WITHIN_S
from triton_omni.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    RequestTimeoutError,
    StageError,
)

pytestmark = pytest.mark.asyncio
END = {"type": "end", "finish_reason": "stop"}


def response(text="", audio=b"", event=None):
    outputs = [
        ("TEXT", text.encode(), True),
        ("AUDIO", audio, False),
        ("EVENT", json.dumps(event or {}).encode(), True),
    ]
    result = service_pb2.ModelInferResponse()
    for name, data, is_bytes in outputs:
        result.outputs.add(name=name)
        result.raw_output_contents.append((len(data).to_bytes(4, "little") if is_bytes else b"") + data)
    return service_pb2.ModelStreamInferResponse(infer_response=result)


SIGN_OF_LIFE = response()


class Omni(service_pb2_grpc.GRPCInferenceServiceServicer):
    """``script``: responses, error messages, a status code to abort with, or an Event to wait for. ``takes_back``:
    heeds cancel keys; ``taken_back`` holds them either way.
    """

    def __init__(self, *script, takes_back=True):
        self.script = script
        self.takes_back = takes_back
        self.request = None
        self.ended = asyncio.Event()
        self.taken_back = []
        self.cancelled_streams = 0
        self.open = {}
        self.not_ready = ()
        self.thinker_error = ""

    async def ModelStreamInfer(self, requests, context):
        request = await anext(requests)
        inputs = {tensor.name: raw[4:] for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        if request.model_name == "thinker":
            for error in self._thinker(inputs):
                yield service_pb2.ModelStreamInferResponse(error_message=error)
            return
        key = inputs["CANCEL_KEY"]
        if not inputs["REQUEST"]:
            self._take_back(key)
            return
        self.request = request
        left = self.open[key] = asyncio.Event()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    waits = [asyncio.ensure_future(step.wait()), asyncio.ensure_future(left.wait())]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    if left.is_set():
                        yield service_pb2.ModelStreamInferResponse(error_message="cancelled: the caller left")
                        return
                elif isinstance(step, grpc.StatusCode):
                    await context.abort(step, "as told")
                elif isinstance(step, str):
                    yield service_pb2.ModelStreamInferResponse(error_message=step)
                else:
                    yield step
        except asyncio.CancelledError:
            self.cancelled_streams += 1
            raise
        finally:
            self.ended.set()

    def _take_back(self, key):
        self.taken_back.append(key)
        if self.takes_back and key in self.open:
            self.open[key].set()

    def _thinker(self, inputs):
        assert json.loads(inputs["REQUEST"])["op"] == "cancel"
        return [self.thinker_error] if self.thinker_error else []

    async def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name not in self.not_ready)


@contextlib.asynccontextmanager
async def engine_of(omni, stall_timeout_s=WITHIN_S, leave_timeout_s=WITHIN_S):
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(omni, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine = TritonEngine(f"127.0.0.1:{port}", stall_timeout_s=stall_timeout_s, leave_timeout_s=leave_timeout_s)
    try:
        yield engine
    finally:
        await engine.close()
        await server.stop(None)


async def collect(engine):
    return [piece async for piece in engine.generate({"messages": ["é"]}, [b"a\x00", b"bc"])]


async def test_pieces_arrive_and_the_request_was_whole():
    omni = Omni(response("é", event={"type": "start"}), response(audio=b"\1\0\2\0"), response(event=END))
    async with engine_of(omni) as engine:
        pieces = await collect(engine)
    assert [(p.text, p.audio, p.event) for p in pieces] == [
        ("é", b"", {"type": "start"}),
        ("", b"\1\0\2\0", {}),
        ("", b"", END),
    ]
    assert omni.request.model_name == "omni_bls"
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in omni.request.inputs] == [
        ("REQUEST", "BYTES", [1]),
        ("CANCEL_KEY", "BYTES", [1]),
        ("MEDIA", "BYTES", [2]),
    ]
    text = '{"messages":["é"]}'.encode()
    media = b"\2\0\0\0a\0" + b"\2\0\0\0bc"
    request, _, files = omni.request.raw_input_contents
    assert (request, files) == (len(text).to_bytes(4, "little") + text, media)
    assert omni.taken_back == []


@pytest.mark.parametrize(
    ("step", "kind", "field"),
    [
        ("invalid_request [thinker.top_p]: must lie in (0, 1]", InvalidRequestError, "thinker.top_p"),
        ("in ensemble 'x', not_found [speaker]: nobody", NotFoundError, "speaker"),
        ("stage_failed [talker]: broken", StageError, "talker"),
        ("Exceeds maximum queue size", CapacityError, None),
        ("Request for unknown model: 'omni_bls' is not found", UnavailableError, None),
        ("something of Triton's own", StageError, "omni_bls"),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError, None),
        (grpc.StatusCode.INTERNAL, StageError, "omni_bls"),
    ],
)
async def test_errors_are_ours(step, kind, field):
    async with engine_of(Omni(response("x"), step)) as engine:
        with pytest.raises(kind) as caught:
            await collect(engine)
    assert caught.value.field == field


async def test_an_answer_has_ended_before_triton_closes_its_stream():
    held = asyncio.Event()
    omni = Omni(response("x"), response(event=END), held)
    async with engine_of(omni) as engine, asyncio.timeout(WITHIN_S):
        assert [piece.event for piece in await collect(engine)] == [{}, END]
        assert not omni.ended.is_set()
        held.set()
        await omni.ended.wait()
    assert (omni.taken_back, omni.cancelled_streams) == ([], 0)


async def test_an_answer_without_its_end_is_an_error():
    async with engine_of(Omni(response("x"))) as engine:
        with pytest.raises(StageError, match="without its end"):
            await collect(engine)


async def test_a_server_that_falls_silent_is_an_error():
    omni = Omni(response("x"), asyncio.Event())
    async with engine_of(omni, stall_timeout_s=0.2, leave_timeout_s=1) as engine:
        with pytest.raises(RequestTimeoutError):
            await collect(engine)
        async with asyncio.timeout(WITHIN_S):
            await omni.ended.wait()


async def test_omni_bls_dies_after_signs_of_life(monkeypatch):
    """Well before the wait for a piece is over."""
    assert 1 <= triton_client.LIFE_EVERY_S < triton_client.SILENCE_S
    monkeypatch.setattr(triton_client, "SILENCE_S", 0.2)
    omni = Omni(SIGN_OF_LIFE, response("x"), SIGN_OF_LIFE, response(event=END))
    async with engine_of(omni, leave_timeout_s=0.2) as engine, asyncio.timeout(WITHIN_S):
        assert [piece.text for piece in await collect(engine)] == ["x", ""]
        assert omni.request.parameters["sign_of_life_s"].int64_param == triton_client.LIFE_EVERY_S
        omni.script = (SIGN_OF_LIFE, response("x"), asyncio.Event())
        answer = engine.generate({}, [])
        assert (await anext(answer)).text == "x"
        with pytest.raises(StageError, match="may have died"):
            await anext(answer)


class Living(Omni):
    """Nothing but signs of life until ``release`` is set."""

    def __init__(self, every_s):
        super().__init__()
        self.every_s, self.release, self.shown = every_s, asyncio.Event(), 0

    async def ModelStreamInfer(self, requests, context):
        while not self.release.is_set():
            self.shown += 1
            yield SIGN_OF_LIFE
            await asyncio.sleep(self.every_s)
        yield response(event=END)


async def test_signs_of_life_keep_a_slow_request_alive(monkeypatch):
    monkeypatch.setattr(triton_client, "SILENCE_S", WITHIN_S / 2)
    omni = Living(0.01)
    async with engine_of(omni) as engine, asyncio.timeout(WITHIN_S):
        answer = asyncio.ensure_future(collect(engine))
        while omni.shown < 20:
            await asyncio.sleep(0.01)
        assert not answer.done()
        omni.release.set()
        assert [piece.event for piece in await answer] == [END]


async def test_signs_of_life_are_no_pieces():
    async with engine_of(Living(0.01), stall_timeout_s=0.2, leave_timeout_s=0.2) as engine:
        with pytest.raises(RequestTimeoutError, match=r"for 0\.2 s"):
            await collect(engine)


async def test_without_a_sign_of_life_a_slow_request_may_be_silent(monkeypatch):
    """A large one on its way, or of an omni_bls that knows none."""
    monkeypatch.setattr(triton_client, "SILENCE_S", 0.05)
    held = asyncio.Event()
    omni = Omni(response("x"), held, response(event=END))
    async with engine_of(omni) as engine, asyncio.timeout(WITHIN_S):
        answer = asyncio.ensure_future(collect(engine))
        await asyncio.sleep(0.5)
        assert not answer.done()
        held.set()
        assert [piece.event for piece in await answer] == [{}, END]


async def test_closing_the_answer_takes_its_request_back_and_no_other():
    staying, release = Omni(response("x"), asyncio.Event()), asyncio.Event()
    async with engine_of(staying) as engine, asyncio.timeout(WITHIN_S):
        left = engine.generate({}, [])
        await anext(left)
        [key] = staying.open
        staying.script = (response("y"), release, response(event=END))
        kept = engine.generate({}, [])
        assert (await anext(kept)).text == "y"
        await left.aclose()
        await staying.ended.wait()
        assert staying.taken_back == [key]
        release.set()
        assert (await anext(kept)).event == END
        assert [piece async for piece in kept] == []
    assert staying.cancelled_streams == 0


async def test_cancelling_the_consumer_takes_the_request_back():
    omni = Omni(response("x"), asyncio.Event())
    async with engine_of(omni) as engine, asyncio.timeout(WITHIN_S):
        answer = engine.generate({}, [])
        await anext(answer)
        task = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        task.cancel()
        await omni.ended.wait()
    assert omni.cancelled_streams == 0
    assert omni.taken_back == list(omni.open)


async def test_a_stream_that_does_not_end_is_cancelled():
    omni = Omni(response("x"), asyncio.Event(), takes_back=False)
    async with engine_of(omni, leave_timeout_s=0.2) as engine, asyncio.timeout(WITHIN_S):
        answer = engine.generate({}, [])
        await anext(answer)
        await answer.aclose()
        await omni.ended.wait()
    assert omni.cancelled_streams == 1


async def test_readiness(monkeypatch):
    monkeypatch.setattr(triton_client, "READY_TIMEOUT_S", WITHIN_S)
    omni = Omni()
    async with engine_of(omni) as engine:
        assert await engine.waiting_for() == []
        omni.not_ready = ("talker",)
        assert await engine.waiting_for() == ["talker"]
        omni.thinker_error = "Stub process 'thinker_0_0' is not healthy."
        assert await engine.waiting_for() == ["talker", "thinker"], "Triton calls it ready"
    engine = TritonEngine("127.0.0.1:1", stall_timeout_s=WITHIN_S)
    assert await engine.waiting_for() == ["tritonserver at 127.0.0.1:1"]
    with pytest.raises(UnavailableError):
        await collect(engine)
    await engine.close()
