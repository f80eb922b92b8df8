"""What a realtime client may do wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import websockets
from fastapi import FastAPI
from websockets.asyncio.client import connect

from openai_frontend.engine import Delta
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, FakeEngine
from tests.openai_frontend.realtime.talk import served, talk_with

pytestmark = pytest.mark.asyncio
MakeApp = Callable[..., FastAPI]
USER = {"type": "message", "role": "user"}
F = {"type": "function", "name": "f"}


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime", **session}}


def add(item: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": item}


BAD = [
    ({"type": "session.upset"}, "type", "session.update"),
    ({}, "type", "missing"),
    ([], "body", "object"),
    (update(tools=[{"type": "mcp", "server_label": "x"}]), "session.tools[0].type", "'function'"),
    (update(tools=[{"type": "function", "server_label": "x"}]), "session.tools[0].server_label", "name"),
    (update(tools=[{"type": "mcp", "name": "x"}]), "session.tools[0].type", "'function'"),
    (update(tools=[F | {"parameters": {"type": "array"}}]), "session.tools[0].parameters.type", "'object'"),
    (update(tools=[F, F]), "session.tools[1].name", "once"),
    (update(tools=[F], tool_choice={"type": "function", "name": "g"}), "session.tool_choice.name", "(f)"),
    (update(tool_choice="required"), "session.tool_choice", "without tools"),
    (update(tool_choice="any"), "session.tool_choice", "'required'"),
    (update(voice="nobody"), "session.audio.output.voice", "Supported"),
    (update(instuctions="x"), "session.instuctions", "instructions"),
    (
        update(audio={"input": {"turn_detection": {"type": "semantic_vad"}}}),
        "session.audio.input.turn_detection.type",
        "",
    ),
    (update(audio={"input": {"format": {"type": "audio/pcmu", "rate": 24_000}}}), "audio.input.format.rate", "8000"),
    (update(audio={"input": {"transcription": {"model": "x"}}}), "session.audio.input.transcription", "leave it out"),
    (update(max_output_tokens=0), "session.max_output_tokens", ""),
    (update(model="other"), "model", MODEL),
    ({"type": "input_audio_buffer.append"}, "audio", ""),
    ({"type": "input_audio_buffer.append", "audio": "%%"}, "audio", "base64"),
    ({"type": "conversation.item.delete", "item_id": "gone"}, "item_id", "no item"),
    ({"type": "conversation.item.retrieve", "item_id": "gone"}, "item_id", "no item"),
    (add(USER | {"content": [{"type": "input_video"}]}), "item.content[0].type", "input_text"),
    (add({"type": "function_call_output", "call_id": "1", "output": ""}), "item.call_id", "no call '1'"),
    (add({"type": "function_call_output", "call_id": "1"}), "item.output", "is missing"),
    (add({"type": "function_call", "arguments": "{}"}), "item.name", "is missing"),
    (add({"type": "mcp_call"}), "item.type", "'function_call'"),
    (
        add(USER | {"content": [{"type": "input_image", "image_url": "http://x/y.png"}]}),
        "item.content[0].image_url",
        "",
    ),
    (add(USER | {"content": [{"type": "input_audio", "audio": ""}]}), "item.content[0].audio", "no sample"),
    ({"type": "response.create"}, "messages", ""),
    ({"type": "response.create", "response": {"tools": [1]}}, "response.tools[0]", "object"),
    (
        {"type": "response.create", "response": {"tools": [F], "tool_choice": {"type": "function", "name": "g"}}},
        "response.tool_choice.name",
        "(f)",
    ),
]


async def test_each_error_names_its_field_and_the_session_goes_on(make_app: MakeApp):
    async with served(make_app(FakeEngine(START, END))) as url, talk_with(url) as talk:
        for body, param, message in BAD:
            await talk.connection.send_raw(json.dumps(body))
            error = (await talk.until("error")).error
            assert (error.type, error.param) == ("invalid_request_error", param), (body, error)
            assert message in error.message, (body, error)
        await talk.write("Hello")
        assert (await talk.until("response.done")).response.status == "completed"


async def test_codes(make_app: MakeApp):
    engine = FakeEngine(START, Delta("One"), asyncio.Event(), END)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.connection.send_raw("{")
        assert (await talk.until("error")).error.code == "invalid_json"
        await talk.send("input_audio_buffer.commit")
        assert (await talk.until("error")).error.code == "input_audio_buffer_commit_empty"
        await talk.write("Count.")
        await engine.waits.wait()
        await talk.send("response.create")
        assert (await talk.until("error")).error.code == "conversation_already_has_active_response"


async def test_a_conversation_has_a_bound(make_app: MakeApp):
    async with served(make_app(FakeEngine(START, END), max_body_bytes=100)) as url, talk_with(url) as talk:
        await talk.send(
            "conversation.item.create", item=USER | {"content": [{"type": "input_text", "text": "a" * 101}]}
        )
        error = (await talk.until("error")).error
        assert (error.param, "100 bytes" in error.message) == ("item", True)


async def test_a_buffer_has_a_bound(make_app: MakeApp):
    async with served(make_app(FakeEngine(), max_media_bytes=32_000)) as url, talk_with(url) as talk:
        await talk.update(audio={"input": {"turn_detection": None}})
        await talk.speak(bytes(52_000), piece_bytes=52_000)
        error = (await talk.until("error")).error
        assert (error.param, "cleared" in error.message) == ("audio", True)


async def status_of(url: str, **options: Any) -> int:
    """101 when the WebSocket is accepted."""
    try:
        async with connect(url.replace("http", "ws", 1), **options):
            return 101
    except websockets.InvalidStatus as refused:
        return refused.response.status_code


async def test_who_may_connect(make_app: MakeApp):
    async with served(make_app(FakeEngine(), api_keys=("right",), cors_origins=("http://friend",))) as url:
        here = f"{url}/v1/realtime?model={MODEL}"
        key = {"additional_headers": {"authorization": "Bearer right"}}
        assert await status_of(here) == 401
        assert await status_of(here, subprotocols=["realtime", "openai-insecure-api-key.wrong"]) == 401
        assert await status_of(here, subprotocols=["realtime", "openai-insecure-api-key.right"]) == 101
        assert await status_of(here, **key) == 101
        assert await status_of(f"{url}/v1/realtime?model=other", **key) == 404
        assert await status_of(f"{url}/v1/realtime", **key) == 400
        assert await status_of(here, **key, origin="http://elsewhere") == 403
        assert await status_of(here, **key, origin="http://friend") == 101
        assert await status_of(here, **key, origin=url) == 101


@pytest.mark.parametrize("subprotocols", [None, ["realtime"]])
async def test_a_subprotocol_is_answered_when_offered(make_app: MakeApp, subprotocols):
    async with served(make_app(FakeEngine())) as url:
        target = f"{url.replace('http', 'ws', 1)}/v1/realtime?model={MODEL}"
        async with connect(target, subprotocols=subprotocols) as connection:
            assert connection.subprotocol == (subprotocols and "realtime")
