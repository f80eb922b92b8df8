"""Frames in, messages out, and the other way; the server's side is written by hand."""

from __future__ import annotations

import asyncio

import hpack
import pytest
from grpc import StatusCode

from openai_frontend.rpc import frames
from openai_frontend.rpc.call import WAITING_MESSAGES, WINDOW_BYTES, RpcError
from openai_frontend.rpc.connection import CONNECTION_WINDOW_BYTES, MAX_FRAME_BYTES
from tests.openai_frontend.fakes import WITHIN_S
from tests.openai_frontend.rpc.wire import DONE, OPENED, Wire, block, data, headers, message, trailers

pytestmark = pytest.mark.asyncio
ANSWER = headers(OPENED) + data(b"one") + data(b"", b"three" * 2000) + trailers(DONE)


async def messages_of(call):
    found = []
    while (got := await call.next()) is not None:
        found.append(got)
    return found


async def error_of(call):
    with pytest.raises(RpcError) as caught:
        await messages_of(call)
    return caught.value


async def test_what_it_asks_of_the_server():
    settings, window = Wire().sent()
    assert settings[0] == frames.SETTINGS
    assert frames.read_settings(settings[3]) == {
        frames.HEADER_TABLE_SIZE: 0,
        frames.ENABLE_PUSH: 0,
        frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
    }
    assert window[0] == frames.WINDOW_UPDATE
    assert frames.DEFAULT_WINDOW + frames.number(window[3]) == CONNECTION_WINDOW_BYTES


async def test_a_request():
    wire = Wire()
    for stream_id in (1, 3):
        wire.sent()
        wire.call(b"ask")
        head, body = wire.sent()
        assert head[:3] == (frames.HEADERS, frames.END_HEADERS, stream_id)
        assert dict(hpack.Decoder().decode(head[3])) == {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/package.Service/Method",
            ":authority": "server:1",
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "triton-omni",
        }
        assert body == (frames.DATA, frames.END_STREAM, stream_id, message(b"ask"))


@pytest.mark.parametrize("size", [1, 7, 4096, len(ANSWER)])
async def test_an_answer_in_pieces_of_any_size(size):
    wire = Wire()
    call = wire.call()
    for position in range(0, len(ANSWER), size):
        wire.answers(ANSWER[position : position + size])
    assert await messages_of(call) == [b"one", b"", b"three" * 2000]


async def test_a_message_over_several_frames_beside_another_answer():
    wire = Wire()
    first, second = wire.call(), wire.call()
    whole = message(b"x" * 100) + message(b"y")
    pieces = [whole[:3], whole[3:60], whole[60:]]
    for piece in pieces:
        wire.answers(frames.frame(frames.DATA, 0, 1, piece), data(b"other", stream_id=3))
    wire.answers(trailers(DONE), trailers(DONE, stream_id=3))
    assert await messages_of(first) == [b"x" * 100, b"y"]
    assert await messages_of(second) == [b"other"] * 3


async def test_padding_priority_and_headers_in_several_frames():
    wire = Wire()
    call = wire.call()
    opened, done = block(OPENED), block(DONE)
    padded, both = frames.PADDED, frames.PADDED | frames.PRIORITISED
    wire.answers(
        frames.frame(frames.HEADERS, both, 1, b"\2" + bytes(5) + opened[:4] + bytes(2)),
        frames.frame(frames.CONTINUATION, 0, 1, opened[4:9]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, opened[9:]),
        frames.frame(frames.DATA, padded, 1, b"\3" + message(b"one") + bytes(3)),
        frames.frame(frames.HEADERS, frames.END_STREAM, 1, done[:2]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, done[2:]),
    )
    assert await messages_of(call) == [b"one"]


async def test_a_large_request_waits_for_room():
    wire = Wire()
    wire.sent()
    request = bytes(range(256)) * 1000
    wire.call(request)
    _, *body = wire.sent()
    assert {len(frame[3]) for frame in body} <= {frames.DEFAULT_FRAME, frames.DEFAULT_FRAME - 1}
    assert sum(len(frame[3]) for frame in body) == frames.DEFAULT_WINDOW
    wire.answers(frames.window_update(1, 100_000))
    assert wire.sent() == []  # the connection's window is full, too
    wire.answers(frames.window_update(0, 150_000))
    body += wire.sent()
    assert sum(len(frame[3]) for frame in body) == frames.DEFAULT_WINDOW + 100_000
    values = {frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW + 20_000, frames.MAX_FRAME_SIZE: 2**20}
    wire.answers(frames.settings(values))
    acknowledged, one_frame = wire.sent()
    assert acknowledged[:2] == (frames.SETTINGS, frames.ACK)
    assert len(one_frame[3]) == 20_000
    wire.answers(frames.window_update(1, 2**20), frames.window_update(0, 2**20))
    body += [one_frame, *wire.sent()]
    assert b"".join(frame[3] for frame in body) == message(request)
    assert [frame[1] for frame in body] == [0] * (len(body) - 1) + [frames.END_STREAM]


async def test_who_does_not_read_keeps_the_server_waiting():
    wire = Wire()
    call = wire.call()
    wire.answers(headers(OPENED), *(data(bytes(2**14)) for _ in range(WAITING_MESSAGES)))
    wire.sent()
    wire.answers(data(b"more"))
    assert wire.sent() == []
    for _ in range(2):
        await call.next()
    [(kind, _, stream_id, size)] = wire.sent()
    assert (kind, stream_id) == (frames.WINDOW_UPDATE, 1)
    assert frames.number(size) >= WINDOW_BYTES // 2


async def test_a_message_larger_than_the_window_gets_through():
    wire = Wire()
    call = wire.call()
    whole, granted = message(bytes(3 * WINDOW_BYTES)), WINDOW_BYTES
    wire.answers(headers(OPENED))
    wire.sent()
    for position in range(0, len(whole), 2**16):
        piece = whole[position : position + 2**16]
        granted -= len(piece)
        assert granted >= 0
        wire.answers(frames.frame(frames.DATA, 0, 1, piece))
        granted += sum(frames.number(payload) for _, _, _, payload in wire.sent())
    assert await call.next() == bytes(3 * WINDOW_BYTES)


async def test_the_connections_window_does_not_wait_for_readers():
    wire = Wire()
    wire.call()
    wire.sent()
    wire.connection._ungranted_bytes = CONNECTION_WINDOW_BYTES // 2 - 1
    wire.answers(data(b"x"))
    [(kind, _, stream_id, size)] = wire.sent()
    assert (kind, stream_id) == (frames.WINDOW_UPDATE, 0)
    assert frames.number(size) == CONNECTION_WINDOW_BYTES // 2 - 1 + len(message(b"x"))


async def test_settings_and_pings_are_acknowledged():
    wire = Wire()
    wire.sent()
    wire.answers(frames.settings({}), frames.frame(frames.PING, 0, 0, b"12345678"))
    wire.answers(frames.frame(frames.SETTINGS, frames.ACK, 0), frames.frame(frames.PING, frames.ACK, 0, b"12345678"))
    assert wire.sent() == [(frames.SETTINGS, frames.ACK, 0, b""), (frames.PING, frames.ACK, 0, b"12345678")]


async def test_as_many_calls_as_the_server_wants():
    wire = Wire()
    wire.answers(frames.settings({frames.MAX_CONCURRENT_STREAMS: 1}))
    assert wire.connection.has_room
    wire.call()
    assert wire.connection.is_usable and not wire.connection.has_room
    wire.answers(headers(OPENED), trailers(DONE))
    assert wire.connection.has_room


@pytest.mark.parametrize(
    ("end", "code", "details"),
    [
        (trailers({"grpc-status": "13", "grpc-message": "100%25 lost: %C3%A9"}), StatusCode.INTERNAL, "100% lost: é"),
        (trailers(OPENED | {"grpc-status": "8"}), StatusCode.RESOURCE_EXHAUSTED, ""),
        (trailers({"grpc-status": "77", "grpc-message": "?"}), StatusCode.UNKNOWN, "?"),
        (trailers({":status": "503"}), StatusCode.UNAVAILABLE, "503"),
        (headers({":status": "404"}), StatusCode.UNKNOWN, "404"),
        (frames.frame(frames.DATA, frames.END_STREAM, 1), StatusCode.UNKNOWN, "no gRPC status"),
        (frames.reset(1, frames.REFUSED_STREAM), StatusCode.UNAVAILABLE, "HTTP/2 error 7"),
        (frames.reset(1, frames.CANCEL), StatusCode.CANCELLED, "HTTP/2 error 8"),
        (frames.reset(1, 2), StatusCode.INTERNAL, "HTTP/2 error 2"),
    ],
)
async def test_errors(end, code, details):
    wire = Wire()
    call, other = wire.call(), wire.call()
    wire.answers(end)
    error = await error_of(call)
    assert error.code is code
    assert details in error.details
    wire.answers(trailers(DONE, stream_id=3))
    assert await messages_of(other) == []


async def test_an_early_end_stops_the_request():
    wire = Wire()
    call = wire.call(bytes(200_000))
    wire.sent()
    wire.answers(trailers({"grpc-status": "8", "grpc-message": "too large"}))
    assert (await error_of(call)).code is StatusCode.RESOURCE_EXHAUSTED
    assert wire.sent() == [(frames.RST_STREAM, 0, 1, frames.CANCEL.to_bytes(4, "big"))]
    wire.answers(frames.window_update(1, 10**6), frames.window_update(0, 10**6))
    assert wire.sent() == []


async def test_a_server_that_leaves_answers_what_it_has_begun():
    wire = Wire()
    first, second = wire.call(), wire.call()
    wire.answers(frames.frame(frames.GOAWAY, 0, 0, bytes([0, 0, 0, 1, 0, 0, 0, 0]) + b"too old"))
    assert not wire.connection.is_usable
    error = await error_of(second)
    assert (error.code, error.details) == (StatusCode.UNAVAILABLE, "the server left too old")
    wire.answers(headers(OPENED), data(b"one"), trailers(DONE))
    assert await messages_of(first) == [b"one"]
    assert wire.closed


async def test_a_connection_that_is_lost():
    wire = Wire()
    call = wire.call()
    wire.answers(headers(OPENED), data(b"one"))
    wire.connection.connection_lost(ConnectionResetError("reset by peer"))
    assert await call.next() == b"one"
    error = await error_of(call)
    assert error.code is StatusCode.UNAVAILABLE
    assert "reset by peer" in error.details
    assert not wire.connection.is_usable


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.head(frames.DATA, 0, 1, MAX_FRAME_BYTES + 1),
        frames.frame(frames.DATA, 0, 1, message(b"x", compressed=1)),
        frames.frame(frames.DATA, frames.PADDED, 1, b"\x09x"),
        frames.frame(frames.DATA, frames.PADDED, 1),
        frames.frame(frames.HEADERS, 0, 1, block(OPENED)) + data(b"x"),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block(OPENED)),
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff"),
        frames.frame(frames.HEADERS, 0, 1, bytes(2**17)),
        frames.frame(frames.SETTINGS, 0, 0, b"short"),
        frames.frame(frames.RST_STREAM, 0, 1, b"?"),
    ],
)
async def test_who_speaks_something_else_is_left(said):
    wire = Wire()
    call = wire.call()
    wire.answers(said)
    assert wire.closed and not wire.connection.is_usable
    wire.connection.connection_lost(None)
    error = await error_of(call)
    assert error.code is StatusCode.UNAVAILABLE
    assert "does not speak HTTP/2 as expected" in error.details


async def test_a_cancelled_call():
    wire = Wire()
    call = wire.call()
    wire.sent()
    call.cancel()
    call.cancel()
    assert wire.sent() == [(frames.RST_STREAM, 0, 1, frames.CANCEL.to_bytes(4, "big"))]
    wire.answers(headers(OPENED), data(b"late"), trailers(DONE))
    assert (await error_of(call)).code is StatusCode.CANCELLED
    assert not wire.closed


async def test_a_wait_may_be_left():
    wire = Wire()
    call = wire.call()
    waiting = asyncio.ensure_future(call.next())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    wire.answers(headers(OPENED), data(b"one"), trailers(DONE))
    assert await messages_of(call) == [b"one"]


async def test_silence_has_a_limit():
    wire = Wire()
    call = wire.call(stall_timeout_s=0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await call.next()
    wire.answers(headers(OPENED), data(b"one"), trailers(DONE))
    assert await messages_of(call) == [b"one"]


async def test_only_a_wait_is_limited():
    wire = Wire()
    call = wire.call(stall_timeout_s=0.05)
    wire.answers(headers(OPENED), data(b"one"), data(b"two"))
    waiting = asyncio.ensure_future(call.next())
    assert await waiting == b"one"
    await asyncio.sleep(0.15)  # nobody waits, so nothing runs out
    assert await call.next() == b"two"


async def test_a_call_that_is_left_is_read_to_its_end():
    wire = Wire()
    call = wire.call()
    wire.answers(headers(OPENED), *(data(bytes(2**14)) for _ in range(WAITING_MESSAGES)))
    wire.sent()
    call.leave(60)
    assert [frame[0] for frame in wire.sent()] == [frames.WINDOW_UPDATE]
    wire.answers(data(b"late"))
    assert wire.sent() == []
    wire.answers(trailers(DONE))
    assert call.ended.is_set()
    assert await call.next() is None
    assert wire.sent() == []


async def test_a_call_that_is_left_and_does_not_end_is_cancelled():
    wire = Wire()
    call = wire.call()
    wire.sent()
    call.leave(0.05)
    async with asyncio.timeout(WITHIN_S):
        await call.ended.wait()
    assert [frame[0] for frame in wire.sent()] == [frames.RST_STREAM]
