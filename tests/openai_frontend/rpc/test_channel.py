"""A channel and grpcio's own server."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from grpc import StatusCode

from openai_frontend.rpc import frames
from openai_frontend.rpc.call import RpcError
from openai_frontend.rpc.channel import Channel
from tests.openai_frontend.fakes import WITHIN_S
from tests.openai_frontend.rpc.wire import DONE, OPENED, Wire, headers, message, trailers
from triton_omni.errors import ConfigError
from triton_omni.serve.processes import free_ports

pytestmark = pytest.mark.asyncio
ECHO = "/tests.Service/Echo"


class Echo:
    """Answers with what came, ``times`` times; before the last it waits for ``release``."""

    def __init__(self, times=1):
        self.times = times
        self.release = asyncio.Event()
        self.release.set()
        self.began = asyncio.Event()
        self.open = 0

    async def answer(self, requests, context):
        self.open += 1
        self.began.set()
        try:
            async for request in requests:
                for _ in range(self.times - 1):
                    yield request
                await self.release.wait()
                yield request
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def server_of(echo, port=0):
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo.answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Service", handlers),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def answer(channel, request, method=ECHO):
    call = channel.call(method, request, stall_timeout_s=WITHIN_S)
    found = []
    while (got := await call.next()) is not None:
        found.append(got)
    return found


async def test_messages_of_any_size_go_both_ways():
    async with server_of(Echo(times=3)) as target:
        channel = Channel(target)
        for size in (0, 1, 70_000, 5_000_000):
            whole = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            assert await answer(channel, whole) == [whole] * 3
        await channel.close()


async def test_many_calls_at_a_time():
    async with server_of(Echo(times=5)) as target:
        channel = Channel(target)
        asked = [f"message {number}".encode() * 2000 for number in range(50)]
        answers = await asyncio.gather(*(answer(channel, one) for one in asked))
        assert answers == [[one] * 5 for one in asked]
        await channel.close()


async def test_more_calls_than_the_server_takes_at_a_time():
    wire, channel = Wire(), Channel("server:1")
    channel._connection = wire.connection
    wire.answers(frames.settings({frames.MAX_CONCURRENT_STREAMS: 2}))
    calls = [channel.call(ECHO, b"%d" % number, stall_timeout_s=WITHIN_S) for number in range(4)]
    begun = [stream_id for kind, _, stream_id, _ in wire.sent() if kind == frames.HEADERS]
    assert begun == [1, 3]
    calls[2].cancel()
    wire.answers(headers(OPENED, stream_id=3), trailers(DONE, stream_id=3))
    assert await calls[1].next() is None
    assert [(stream_id, payload) for kind, _, stream_id, payload in wire.sent() if kind == frames.DATA] == [
        (5, message(b"3"))
    ]


async def test_an_error_of_the_server():
    async with server_of(Echo()) as target:
        channel = Channel(target)
        with pytest.raises(RpcError) as caught:
            await answer(channel, b"x", "/tests.Service/Other")
        assert caught.value.code is StatusCode.UNIMPLEMENTED
        await channel.close()


async def test_a_server_that_comes_and_goes():
    (port,) = free_ports(1)  # not one that the system may give away while the server is gone
    channel = Channel(f"127.0.0.1:{port}")
    for _ in range(2):
        results = await asyncio.gather(*(answer(channel, b"x") for _ in range(3)), return_exceptions=True)
        assert [result.code for result in results] == [StatusCode.UNAVAILABLE] * 3
        async with server_of(Echo(), port):
            assert await answer(channel, b"x") == [b"x"]
            assert await answer(channel, b"y") == [b"y"]
        async with asyncio.timeout(WITHIN_S):
            while channel._connection is not None and channel._connection.is_usable:
                await asyncio.sleep(0)  # the end of the connection has yet to arrive
    await channel.close()


async def test_closing_waits_for_what_was_left_and_ends_the_rest():
    echo = Echo()
    async with server_of(echo) as target, asyncio.timeout(WITHIN_S):
        channel = Channel(target)
        left, waited = (channel.call(ECHO, b"x", stall_timeout_s=WITHIN_S) for _ in range(2))
        assert await waited.next() == await left.next() == b"x"
        echo.release.clear()
        left, waited = (channel.call(ECHO, b"x", stall_timeout_s=WITHIN_S) for _ in range(2))
        await echo.began.wait()
        left.leave(WITHIN_S)
        closing = asyncio.ensure_future(channel.close())
        with pytest.raises(RpcError) as caught:
            await waited.next()
        assert caught.value.code is StatusCode.CANCELLED
        assert not closing.done()
        echo.release.set()
        await closing
        assert await left.next() is None


async def test_a_call_that_is_given_up_before_there_is_a_connection_is_never_sent():
    echo = Echo()
    async with server_of(echo) as target:
        channel = Channel(target)
        channel.call(ECHO, b"x", stall_timeout_s=WITHIN_S).cancel()
        assert await answer(channel, b"y") == [b"y"]
        assert echo.open == 0
        await channel.close()


@pytest.mark.parametrize(
    "target", ["", "host", "host:", ":8001", "host:port", "http://host:1", "host:1/path", "a..b:1"]
)
async def test_a_target_is_host_and_port(target):
    with pytest.raises(ConfigError) as caught:
        Channel(target)
    assert caught.value.field == "triton_url"


async def test_a_target_may_be_an_ipv6_address():
    channel = Channel("[::1]:1")
    with pytest.raises(RpcError) as caught:
        await answer(channel, b"x")
    assert caught.value.code is StatusCode.UNAVAILABLE
    await channel.close()
