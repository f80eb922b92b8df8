"""Realtime against the running stack: frontend, tritonserver and its four models."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import pytest

from tests.openai_frontend.fakes import WITHIN_S
from tests.openai_frontend.realtime.talk import question, talk_with
from tests.triton.client import open_sessions
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.asyncio]
SHORT = {"max_output_tokens": 6}
TEXT = "w0 w1 w2 w3 w4 w5 "


async def test_turns_by_text_by_commit_and_by_hearing(null_frontend: FrontendProcess):
    async with talk_with(null_frontend.url) as talk:
        await talk.update(**SHORT, output_modalities=["text"])
        await talk.write("Hello")
        response = (await talk.until("response.done")).response
        assert response.output[0].content[0].text == TEXT
        assert response.status_details.reason == "max_output_tokens"
        await talk.update(output_modalities=["audio"], audio={"input": {"turn_detection": None}})
        await talk.speak(question().tobytes())
        await talk.send("input_audio_buffer.commit")
        await talk.send("response.create")
        response = (await talk.until("response.done")).response
        assert response.output[0].content[0].transcript == TEXT
        frames = response.usage.output_token_details.audio_tokens
        assert len(talk.sound()) == 2 * (frames * 1_920 - 555)
        await talk.update(audio={"input": {"turn_detection": {"type": "server_vad"}}})
        await talk.speak(question().tobytes())
        response = (await talk.until("response.done")).response
        assert len(talk.of("input_audio_buffer.speech_started")) == 1
        assert response.output[0].content[0].transcript == TEXT


async def test_barge_in_frees_every_stage(
    tight_frontend: FrontendProcess, tight_server: TritonServer, eventually: Callable[..., None]
):
    async with talk_with(tight_frontend.url) as talk:
        await talk.write("Hello")
        await talk.until("response.output_audio.delta")
        await asyncio.to_thread(eventually, lambda: not open_sessions(tight_server), WITHIN_S)
        await talk.speak(question()[:48_000].tobytes())
        response = (await talk.until("response.done")).response
        assert (response.status, response.status_details.reason) == ("cancelled", "turn_detected")
        assert 0 < response.usage.output_tokens < 1_020
        await asyncio.to_thread(eventually, lambda: open_sessions(tight_server), WITHIN_S)
        await talk.send("input_audio_buffer.clear")
        await talk.until("input_audio_buffer.cleared")


async def test_a_turn_on_the_demo_model(demo_frontend: FrontendProcess):
    async with talk_with(demo_frontend.url) as talk:
        await talk.update(max_output_tokens=6)
        await talk.speak(question().tobytes())
        response = (await talk.until("response.done")).response
        assert response.status in ("completed", "incomplete")
        assert response.output[0].content[0].transcript
        assert len(base64.b64decode(talk.of("response.output_audio.delta")[0].delta)) > 0
