"""The client leaves: its request is taken back at once, also while nothing is being produced."""

from __future__ import annotations

import asyncio

import pytest

from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine, LeavingClient

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), (START, Delta(text="Hello"))], ids=["before the first piece", "in the middle"])
async def test_leaving_closes_the_answer(make_app, chat, stream, before):
    engine = FakeEngine(*before, asyncio.Event(), END)  # waits for ever
    client = LeavingClient(make_app(engine), chat(stream=stream))
    async with asyncio.timeout(WITHIN_S):
        await engine.waits.wait()
        assert not engine.closed.is_set()
        client.leave()
        await engine.closed.wait()
        await client.done


async def test_a_client_that_does_not_read_is_taken_back_too(make_app, chat):
    """A full connection blocks the send; the answer then waits at its yield, where no cancellation reaches it."""
    engine = FakeEngine(START, Delta(text="Hello"), END)
    client = LeavingClient(make_app(engine), chat(stream=True), reads=False)
    async with asyncio.timeout(WITHIN_S):
        await client.blocked.wait()
        assert not engine.closed.is_set()
        client.leave()
        await engine.closed.wait()
        await client.done


async def test_a_finished_answer_is_closed(make_app, chat):
    engine = FakeEngine(START, END)
    client = LeavingClient(make_app(engine), chat(stream=True))
    async with asyncio.timeout(WITHIN_S):
        await client.done
    assert engine.closed.is_set()
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
