"""A worker's server on both event loops: its connections begin, with TLS too, and it tells what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trustme
import uvloop

from openai_frontend.acceptor import CLOSED, DRAINS, GO_ON, TAKEN
from openai_frontend.worker_loop import HandedConnections, WorkerLoop

TIMEOUT_S = 60
LOOPS = [uvloop.Loop, asyncio.SelectorEventLoop]


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class WhoAmI(asyncio.Protocol):
    """Tells the client's port, and whether small pieces leave at once."""

    def connection_made(self, transport: Any) -> None:
        host, port = transport.get_extra_info("peername")
        no_delay = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.write(f"{host} {port} {bool(no_delay)}\n".encode())


class Hands:
    """The acceptor's end of a worker: hands connections over, and hears what is told."""

    def __init__(self, channel: socket.socket, server: HandedConnections) -> None:
        channel.setblocking(False)
        self.channel, self.server = channel, server

    def hand(self) -> socket.socket:
        """The client's end of a new connection."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            connection, _ = listener.accept()
        with connection:
            socket.send_fds(self.channel, [b"\0"], [connection.fileno()])
        return client

    async def hears(self, message: bytes) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            assert await asyncio.get_running_loop().sock_recv(self.channel, 1) == message


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, protocol: Any = Echo) -> AsyncIterator[Hands]:
    ours, door = socket.socketpair()
    with ours, door:
        server = HandedConnections(asyncio.get_running_loop(), protocol, door, tls)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        with socket.socket(fileno=descriptors[0]) as channel:
            yield Hands(channel, server)
        server.close()
        await server.wait_closed()


async def echo(client: socket.socket, **options: Any) -> bytes:
    """One message there and back; the client leaves then."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(sock=client, **options)
        writer.write(b"hello")
        answer = await reader.readexactly(5)
        writer.close()
        await writer.wait_closed()
    return answer


@pytest.fixture(params=LOOPS, ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def test_connections_begin_and_their_end_is_told(runner: asyncio.Runner):
    async def run() -> None:
        async with serving() as hands:
            clients = [hands.hand() for _ in range(3)]
            for _ in clients:
                await hands.hears(TAKEN)
            for client in clients:
                assert await echo(client) == b"hello"
                await hands.hears(CLOSED)

    runner.run(run())


def test_a_connection_knows_its_client_and_sends_at_once(runner: asyncio.Runner):
    async def run() -> None:
        async with serving(protocol=WhoAmI) as hands, asyncio.timeout(TIMEOUT_S):
            client = hands.hand()
            host, port = client.getsockname()
            reader, writer = await asyncio.open_connection(sock=client)
            assert await reader.readline() == f"{host} {port} True\n".encode()
            writer.close()
            await writer.wait_closed()

    runner.run(run())


def test_tls_and_who_does_not_speak_it(runner: asyncio.Runner):
    authority, ours, theirs = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)

    async def run() -> None:
        async with serving(ours) as hands:
            client = hands.hand()
            await hands.hears(TAKEN)
            assert await echo(client, ssl=theirs, server_hostname="127.0.0.1") == b"hello"
            await hands.hears(CLOSED)
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
                with hands.hand() as client:
                    await hands.hears(TAKEN)
                    client.send(said)
                await hands.hears(CLOSED)

    runner.run(run())


def test_a_worker_that_nobody_hands_connections_to_ends(runner: asyncio.Runner):
    async def run() -> None:
        async with serving() as hands:
            stopped = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
            hands.channel.close()
            await asyncio.wait_for(stopped.wait(), TIMEOUT_S)

    runner.run(run())


@pytest.mark.parametrize("others", [True, False])
def test_one_that_drains_takes_nothing_until_it_knows_whether_there_are_others(runner: asyncio.Runner, others: bool):
    async def run() -> None:
        async with serving() as hands, asyncio.timeout(TIMEOUT_S):
            begun = hands.hand()
            await hands.hears(TAKEN)
            relief = hands.server.hand_over()
            assert hands.server.hand_over() is relief
            await hands.hears(DRAINS)
            untaken = hands.hand()
            if others:
                hands.channel.close()
                assert await relief
                with untaken:
                    assert await asyncio.get_running_loop().run_in_executor(None, untaken.recv, 1) == b""
            else:
                hands.channel.send(GO_ON)
                assert not await relief
                await hands.hears(TAKEN)
                assert await echo(untaken) == b"hello"
                await hands.hears(CLOSED)
            assert await echo(begun) == b"hello"

    runner.run(run())


def test_other_servers_of_the_loop_accept_for_themselves():
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(Echo, "127.0.0.1", 0) as server:
            client = socket.create_connection(server.sockets[0].getsockname())
            assert await echo(client) == b"hello"

    with asyncio.Runner(loop_factory=WorkerLoop) as runner:
        runner.run(run())
