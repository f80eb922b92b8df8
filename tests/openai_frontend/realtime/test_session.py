"""The session behind the ``openai`` client, with a fake engine."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

import numpy as np
import pytest
import soundfile
from fastapi import FastAPI
from websockets import ConnectionClosed

from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine
from tests.openai_frontend.realtime.talk import question, served, talk_with
from triton_omni.errors import StageError

pytestmark = pytest.mark.asyncio
MakeApp = Callable[..., FastAPI]
TONE = (8_000 * np.sin(np.arange(24_000) / 5)).astype(np.int16)
SPOKEN = (START, Delta("The sea "), Delta("is calm.", TONE.tobytes()), Delta("", TONE.tobytes()), END)


async def test_a_typed_turn(make_app: MakeApp):
    engine = FakeEngine(START, Delta("The sea "), Delta("is calm."), END)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        session = await talk.update(instructions="Be brief.", output_modalities=["text"], max_output_tokens=9)
        assert (session.instructions, session.output_modalities) == ("Be brief.", ["text"])
        await talk.write("How is the sea?")
        response = (await talk.until("response.done")).response
    assert talk.types == [
        "session.created",
        "session.updated",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    assert response.status == "completed"
    assert response.output[0].content[0].text == "The sea is calm."
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 5)
    asked = [{"role": "system", "content": "Be brief."}]
    asked += [{"role": "user", "content": [{"type": "text", "text": "How is the sea?"}]}]
    assert engine.request["messages"] == asked
    assert (engine.request["modalities"], engine.request["thinker"]) == (["text"], {"max_tokens": 9})


async def test_a_spoken_turn_by_commit(make_app: MakeApp):
    engine = FakeEngine(*SPOKEN)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        session = await talk.update(audio={"input": {"turn_detection": None}})
        assert session.audio.input.turn_detection is None
        await talk.speak(TONE.tobytes())
        await talk.send("input_audio_buffer.commit")
        committed = await talk.until("input_audio_buffer.committed")
        await talk.send("response.create")
        response = (await talk.until("response.done")).response
    assert talk.sound() == 2 * TONE.tobytes()
    assert response.output[0].content[0].transcript == "The sea is calm."
    assert talk.of("conversation.item.added")[0].item.id == committed.item_id
    assert engine.request["messages"] == [{"role": "user", "content": [{"type": "audio", "media": 0}]}]
    heard, rate_hz = soundfile.read(io.BytesIO(engine.media[0]), dtype="int16")
    assert (rate_hz, len(heard)) == (16_000, 16_000)
    assert np.abs(heard).max() > 7_000


async def test_a_turn_that_the_server_hears(make_app: MakeApp):
    engine = FakeEngine(*SPOKEN)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.speak(question().tobytes())
        assert (await talk.until("response.done")).response.status == "completed"
    (started,) = talk.of("input_audio_buffer.speech_started")
    (stopped,) = talk.of("input_audio_buffer.speech_stopped")
    (committed,) = talk.of("input_audio_buffer.committed")
    assert started.item_id == stopped.item_id == committed.item_id
    assert 100 < started.audio_start_ms < 500 < 3_000 < stopped.audio_end_ms < 4_000
    heard, rate_hz = soundfile.read(io.BytesIO(engine.media[0]))
    assert abs(len(heard) / rate_hz * 1_000 - (stopped.audio_end_ms - started.audio_start_ms)) < 2


async def test_speech_into_an_answer_ends_it_and_what_was_not_played_was_not_said(make_app: MakeApp):
    minute = np.tile(TONE, 60).tobytes()
    forever = asyncio.Event()
    engine = FakeEngine(START, Delta("one two three four " * 60, minute), forever, END)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.write("Count.")
        await talk.until("response.output_audio.delta")
        await engine.waits.wait()
        await talk.speak(question().tobytes())
        response = (await talk.until("response.done")).response
        assert (response.status, response.status_details.reason) == ("cancelled", "turn_detected")
        assert engine.closed.is_set()
        truncated = await talk.until("conversation.item.truncated")
        assert truncated.item_id == response.output[0].id
        assert truncated.audio_end_ms < 60_000
        forever.set()
        assert (await talk.until("response.done")).response.status == "completed"
    roles = [message["role"] for message in engine.request["messages"]]
    said = [message["content"] for message in engine.request["messages"] if message["role"] == "assistant"]
    assert roles == ["user", "user"] if not said else ["user", "assistant", "user"]
    assert all(len(text) <= 19 * truncated.audio_end_ms / 1_000 for text in said)


async def test_speech_that_must_not_interrupt_is_answered_afterwards(make_app: MakeApp):
    hold = asyncio.Event()
    engine = FakeEngine(START, Delta("Yes.", TONE.tobytes()), hold, END)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
        await talk.write("Go on?")
        await talk.speak(question().tobytes())
        await talk.until("input_audio_buffer.committed")
        assert not engine.closed.is_set()
        hold.set()
        for _ in range(2):
            assert (await talk.until("response.done")).response.status == "completed"
    assert [message["role"] for message in engine.request["messages"]] == ["user", "assistant", "user"]


async def test_cancel_reaches_the_engine(make_app: MakeApp):
    engine = FakeEngine(START, Delta("One", TONE.tobytes()), asyncio.Event(), END)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.write("Count.")
        await engine.waits.wait()
        await talk.send("response.cancel")
        response = (await talk.until("response.done")).response
        assert (response.status, response.status_details.reason) == ("cancelled", "client_cancelled")
        assert (response.output[0].status, response.usage.input_tokens) == ("incomplete", 7)
        assert engine.closed.is_set()
        await talk.send("response.cancel", event_id="mine")
        error = (await talk.until("error")).error
        assert (error.code, error.event_id) == ("response_cancel_not_active", "mine")


async def test_a_cancel_before_the_first_piece(make_app: MakeApp):
    engine = FakeEngine(asyncio.Event())
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.write("Count.")
        await talk.send("response.cancel")
        response = (await talk.until("response.done")).response
        assert (response.status, response.output) == ("cancelled", [])


async def test_who_leaves_takes_the_answer_along(make_app: MakeApp):
    engine = FakeEngine(START, Delta("One"), asyncio.Event(), END)
    async with served(make_app(engine)) as url:
        async with talk_with(url) as talk:
            await talk.write("Count.")
            await engine.waits.wait()
            assert not engine.closed.is_set()
        async with asyncio.timeout(WITHIN_S):
            await engine.closed.wait()


async def test_the_client_says_what_it_played(make_app: MakeApp):
    engine = FakeEngine(*SPOKEN)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.write("How is the sea?")
        item = (await talk.until("response.done")).response.output[0]
        await talk.send("conversation.item.truncate", item_id=item.id, content_index=0, audio_end_ms=2_001)
        assert "2000 ms" in (await talk.until("error")).error.message
        await talk.send("conversation.item.truncate", item_id=item.id, content_index=0, audio_end_ms=1_400)
        await talk.until("conversation.item.truncated")
        await talk.send("conversation.item.retrieve", item_id=item.id)
        assert (await talk.until("conversation.item.retrieved")).item.content[0].transcript == "The sea is"
        await talk.write("And then?")
        await talk.until("response.done")
        assert engine.request["messages"][1] == {"role": "assistant", "content": "The sea is"}
        await talk.send("conversation.item.delete", item_id=item.id)
        await talk.until("conversation.item.deleted")
        await talk.write("Well?")
        await talk.until("response.done")
    assert [message["role"] for message in engine.request["messages"]] == ["user", "user", "assistant", "user"]


async def test_an_answer_outside_the_conversation(make_app: MakeApp):
    engine = FakeEngine(*SPOKEN)
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        say = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Aside"}]}
        options = {"conversation": "none", "input": [say], "output_modalities": ["text"], "instructions": "Whisper."}
        await talk.send("response.create", response=options | {"metadata": {"topic": "aside"}})
        response = (await talk.until("response.done")).response
        assert (response.metadata, response.conversation_id) == ({"topic": "aside"}, None)
        assert [message["role"] for message in engine.request["messages"]] == ["system", "user"]
        await talk.write("Hello")
        await talk.until("response.done")
    assert [message["role"] for message in engine.request["messages"]] == ["user"]


async def test_an_engine_that_fails_fails_the_response(make_app: MakeApp):
    engine = FakeEngine(START, Delta("One"), StageError("thinker", "out of paper"))
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.write("Count.")
        response = (await talk.until("response.done")).response
        assert response.status == "failed"
        assert "out of paper" in response.status_details.error.message


async def test_g711_both_ways(make_app: MakeApp):
    engine = FakeEngine(*SPOKEN)
    ulaw = {"type": "audio/pcmu"}
    async with served(make_app(engine)) as url, talk_with(url) as talk:
        await talk.update(audio={"input": {"format": ulaw, "turn_detection": None}, "output": {"format": ulaw}})
        await talk.speak(b"\xff\x00" * 4_000, piece_bytes=333)
        await talk.send("input_audio_buffer.commit")
        await talk.send("response.create")
        await talk.until("response.done")
    assert len(talk.sound()) == 16_000
    heard, _ = soundfile.read(io.BytesIO(engine.media[0]))
    assert len(heard) == 16_000


async def test_the_betas_names(make_app: MakeApp):
    async with served(make_app(FakeEngine())) as url, talk_with(url) as talk:
        flat = {"modalities": ["text", "audio"], "input_audio_format": "g711_alaw", "turn_detection": None}
        session = await talk.update(**flat, max_response_output_tokens=5)
        assert session.output_modalities == ["audio"]
        assert session.audio.input.format.type == "audio/pcma"
        assert session.audio.input.turn_detection is None
        assert session.max_output_tokens == 5


async def test_a_server_that_is_to_stop_ends_the_session_after_its_answer(make_app: MakeApp):
    hold = asyncio.Event()
    engine = FakeEngine(START, Delta("One"), hold, Delta(" two."), END)
    app = make_app(engine)
    async with served(app) as url, talk_with(url) as talk:
        await talk.write("Count.")
        await engine.waits.wait()
        draining = asyncio.ensure_future(app.state.context.drain.finish())
        await app.state.context.drain.beginning.wait()
        hold.set()
        response = (await talk.until("response.done")).response
        assert (response.status, response.output[0].content[0].transcript) == ("completed", "One two.")
        with pytest.raises(ConnectionClosed) as closed:
            await talk.until("session.updated")
        assert closed.value.rcvd.code == 1001
        async with asyncio.timeout(WITHIN_S):
            await draining


async def test_a_session_begins_with_the_operators_prompt(make_app: MakeApp):
    engine = FakeEngine(*SPOKEN)
    async with served(make_app(engine, speech_system_prompt="Speak briefly.")) as url, talk_with(url) as talk:
        assert talk.of("session.created")[0].session.instructions == "Speak briefly."
        await talk.write("Hello")
        await talk.until("response.done")
        assert engine.request["messages"][0] == {"role": "system", "content": "Speak briefly."}
        assert (await talk.update(instructions="")).instructions == ""
