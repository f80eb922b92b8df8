"""Several choices in one answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from openai_frontend.choices import merged
from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START, USAGE, WITHIN_S, FakeEngine, LeavingClient, client_of, events_of
from triton_omni.errors import CapacityError, StageError
from triton_omni.sampling import MAX_SEED

pytestmark = pytest.mark.asyncio
URL = "/v1/chat/completions"


class CountingEngine(FakeEngine):
    """The answer with number i says its number and costs i more tokens."""

    async def generate(self, request, media):
        number = len(self.requests)
        async with aclosing(super().generate(request, media)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield Delta(text=f"{piece.text}{number}")
                elif piece.event.get("type") == "end":
                    yield Delta(event={**piece.event, "usage": USAGE | {"text_tokens": 3 + number}})
                else:
                    yield piece


SCRIPT = (START, Delta(text="one "), Delta(text="two "), END)
TEXTS = [f"one {i}two {i}" for i in range(3)]
COUNTED = {"prompt_tokens": 7, "completion_tokens": 3 + 4 + 5 + 3 * 2, "total_tokens": 7 + 12 + 6}


async def test_whole(make_app, chat):
    engine = CountingEngine(*SCRIPT)
    async with client_of(make_app(engine)) as client:
        answer = (await client.post(URL, json=chat(n=3, seed=MAX_SEED - 1, temperature=1))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == TEXTS
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert {name: answer["usage"][name] for name in COUNTED} == COUNTED
    assert [request["thinker"]["seed"] for request in engine.requests] == [MAX_SEED - 1, MAX_SEED, 0]
    assert engine.running == 0


async def test_without_a_seed_each_has_its_own_chance(make_app, chat):
    engine = FakeEngine(*SCRIPT)
    async with client_of(make_app(engine)) as client:
        await client.post(URL, json=chat(n=2, temperature=1))
    assert [request["thinker"] for request in engine.requests] == [{"temperature": 1.0}] * 2


async def test_streamed(make_app, chat):
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with client_of(make_app(CountingEngine(*SCRIPT))) as client:
        *events, last = events_of(await client.post(URL, json=chat(**options)))
    choices = [event["choices"][0] for event in events]
    assert [(c["index"], c["delta"].get("role")) for c in choices[:3]] == [(i, "assistant") for i in range(3)]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == TEXTS[index]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert last["choices"] == []
    assert {name: last["usage"][name] for name in COUNTED} == COUNTED
    assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_ends_all(make_app, chat, stream):
    engine = FakeEngine(START, Delta(text="Hello"), asyncio.Event(), END)
    client = LeavingClient(make_app(engine), chat(n=4, stream=stream))
    async with asyncio.timeout(WITHIN_S):
        while engine.running < 4:
            await engine.waits.wait()
            await asyncio.sleep(0)
        client.leave()
        await client.done
    assert engine.running == 0


class OneFails(FakeEngine):
    async def generate(self, request, media):
        number = len(self.requests)
        async with aclosing(super().generate(request, media)) as pieces:
            async for piece in pieces:
                yield piece
                if number == 1 and piece.text:
                    raise StageError("thinker", "out of paper")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_error_ends_all(make_app, chat, stream):
    engine = OneFails(START, Delta(text="Hello"), asyncio.Event(), END)
    async with client_of(make_app(engine)) as client:
        response = await client.post(URL, json=chat(n=3, stream=stream))
    error = events_of(response)[-1]["error"] if stream else response.json()["error"]
    assert "out of paper" in error["message"]
    assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_no_room_is_told_before_anything_else(make_app, chat, stream):
    async with client_of(make_app(FakeEngine(CapacityError("full")))) as client:
        response = await client.post(URL, json=chat(n=2, stream=stream))
    assert response.status_code == 429


async def test_a_slow_reader_stops_the_engines():
    made = 0

    async def endless():
        nonlocal made
        while True:
            made += 1
            await asyncio.sleep(0)
            yield Delta(text="x")

    pieces = merged([endless(), endless()])
    async with asyncio.timeout(WITHIN_S):
        assert {(await anext(pieces)).choice for _ in range(200)} == {0, 1}
        await pieces.aclose()
    assert made < 600
