"""A worker that is to end: what becomes of requests over the connections that it has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from openai_frontend.acceptor import DRAINS, GO_ON
from openai_frontend.drain import Drain, DrainMiddleware
from openai_frontend.worker_loop import WorkerLoop

TIMEOUT_S = 60


@contextlib.asynccontextmanager
async def channel() -> AsyncIterator[socket.socket]:
    """The acceptor's end of this loop's channel."""
    ours, door = socket.socketpair()
    with ours, door:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, sock=door)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        with socket.socket(fileno=descriptors[0]) as theirs:
            theirs.setblocking(False)
            yield theirs
        server.close()


class Answers:
    """An application that answers when it may go on, and what its server sends."""

    def __init__(self, drain: Drain) -> None:
        self.go_on = asyncio.Event()
        self._middleware = DrainMiddleware(self._app, drain)

    async def ask(self, kind: str = "http") -> tuple[int, str | None]:
        """The answer's status and its header connection."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": kind, "path": "/v1/models", "headers": [], "method": "GET", "extensions": {}}
        await self._middleware(scope, self._receive, send)
        headers = {name.decode().lower(): value.decode() for name, value in sent[0].get("headers", [])}
        return sent[0]["status"], headers.get("connection")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def _receive(self) -> Any:
        return {"type": "http.request"}


async def drains(theirs: socket.socket) -> None:
    assert await asyncio.get_running_loop().sock_recv(theirs, 1) == DRAINS


@pytest.mark.parametrize("others", [True, False])
def test_requests_that_still_come(others: bool) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), channel() as theirs, asyncio.TaskGroup() as tasks:
            drain = Drain(TIMEOUT_S)
            answers = Answers(drain)
            open_before = tasks.create_task(answers.ask())
            while not drain.open_requests:
                await asyncio.sleep(0)
            assert not await drain.is_relieved()
            finishing = tasks.create_task(drain.finish())
            await drains(theirs)
            came_meanwhile = tasks.create_task(answers.ask())
            await asyncio.sleep(0)
            assert not came_meanwhile.done()  # it is not refused before that is known to be right
            if others:
                theirs.close()
            else:
                theirs.send(GO_ON)
                assert await came_meanwhile == (503, "close")
            assert await drain.is_relieved() == others
            assert (await answers.ask("websocket"))[0] == 503  # a session has no last answer
            answers.go_on.set()
            assert await answers.ask() == ((200, "close") if others else (503, "close"))
            assert await came_meanwhile == ((200, "close") if others else (503, "close"))
            assert await open_before == (200, None)
            await finishing

    with asyncio.Runner(loop_factory=WorkerLoop) as runner:
        runner.run(run())


def test_without_an_acceptor_nobody_takes_its_place() -> None:
    async def run() -> None:
        drain = Drain(TIMEOUT_S)
        await drain.finish()
        assert not await drain.is_relieved()
        assert await Answers(drain).ask() == (503, "close")

    asyncio.run(run())
