"""A request through every stage as a sign of health."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from openai_frontend.engine import Delta
from openai_frontend.probe import Probe
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of
from triton_omni.errors import CapacityError, RequestTimeoutError, StageError
from triton_omni.serve.frontend import FrontendProcess

URL = "/health/probe"
ANSWER = (START, Delta(text="He"), Delta(audio=bytes(20)), END)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        (ANSWER, 200, '"status":"ok"'),
        ((CapacityError("full"),), 200, '"status":"busy"'),
        ((StageError("talker", "gone"),), 500, "gone"),
        ((START, Delta(text="He"), END), 500, "without audio"),
        ((START, Delta(audio=bytes(20)), END), 500, "without text"),
        ((ZeroDivisionError("what"),), 500, "ZeroDivisionError"),
    ],
)
async def test_what_it_tells(make_app, script, status, told):
    async with client_of(make_app(FakeEngine(*script))) as client:
        response = await client.get(URL)
    assert response.status_code == status
    assert told in response.text


@pytest.mark.asyncio
async def test_those_that_ask_at_once_share_one_request():
    hold = asyncio.Event()
    engine = FakeEngine(*ANSWER[:2], hold, *ANSWER[2:])
    probe = Probe(engine, speaks=True)
    first, leaving, second = (asyncio.ensure_future(probe.run()) for _ in range(3))
    await engine.waits.wait()
    leaving.cancel()
    hold.set()
    assert await first == await second
    assert len(engine.requests) == 1
    await probe.run()
    assert len(engine.requests) == 2


@pytest.mark.asyncio
async def test_an_engine_that_hangs():
    engine = FakeEngine(START, asyncio.Event())
    with pytest.raises(RequestTimeoutError, match="no whole answer"):
        await Probe(engine, speaks=True, limit_s=0.05).run()
    assert engine.closed.is_set()


@pytest.mark.asyncio
async def test_a_key_is_asked_for(make_app):
    async with client_of(make_app(FakeEngine(*ANSWER), api_keys=("right",))) as client:
        assert (await client.get(URL)).status_code == 401


@pytest.mark.triton
def test_through_the_running_stack(null_frontend: FrontendProcess):
    told = httpx.get(f"{null_frontend.url}{URL}", timeout=60).json()
    assert told["status"] == "ok"
    assert 0 < told["first_text_ms"] <= told["first_audio_ms"] <= told["total_ms"]
