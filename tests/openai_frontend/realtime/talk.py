"""A realtime conversation through the ``openai`` client, and what it is had with."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import soundfile
import uvicorn
from fastapi import FastAPI

from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import WITHIN_S

RECORDING = Path(__file__).resolve().parents[2] / "data" / "question.wav"


def question() -> np.ndarray:
    """Somebody asks something: int16 at 24 kHz, with silence before and after."""
    samples, rate_hz = soundfile.read(RECORDING, dtype="int16")
    assert rate_hz == 24_000
    return np.concatenate([np.zeros(12_000, np.int16), samples, np.zeros(24_000, np.int16)])


class Talk:
    """One session. ``received``: every event so far."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.received: list[Any] = []

    async def send(self, event: str, **fields: Any) -> None:
        await self.connection.send({"type": event, **fields})

    async def until(self, *types: str) -> Any:
        """The next event of one of these types."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                event = await self.connection.recv()
                self.received.append(event)
                assert event.type != "error" or "error" in types, event.error
                if event.type in types:
                    return event

    async def update(self, **session: Any) -> Any:
        await self.send("session.update", session={"type": "realtime", **session})
        return (await self.until("session.updated")).session

    async def write(self, text: str, **options: Any) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", **({"response": options} if options else {}))

    async def speak(self, data: bytes, piece_bytes: int = 4_801) -> None:
        for start in range(0, len(data), piece_bytes):
            audio = base64.b64encode(data[start : start + piece_bytes]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    def of(self, event: str) -> list[Any]:
        return [known for known in self.received if known.type == event]

    @property
    def types(self) -> list[str]:
        """Of all events, those that follow one of their own type left out."""
        types = [event.type for event in self.received]
        return [name for i, name in enumerate(types) if i == 0 or types[i - 1] != name]

    def sound(self) -> bytes:
        return b"".join(base64.b64decode(event.delta) for event in self.of("response.output_audio.delta"))


@asynccontextmanager
async def talk_with(url: str, key: str = "unused") -> AsyncIterator[Talk]:
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1", websocket_base_url=f"{url.replace('http', 'ws', 1)}/v1", api_key=key
    )
    async with client, client.realtime.connect(model=MODEL) as connection:
        talk = Talk(connection)
        await talk.until("session.created")
        yield talk


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """``app`` behind uvicorn in this loop; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
    listener = server.config.bind_socket()
    serving = asyncio.ensure_future(server._serve([listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)  # uvicorn has no event for it
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
