"""One answer: the engine's pieces as response events, whatever way it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal, TypeAlias

import numpy as np
from starlette.websockets import WebSocketDisconnect

from openai_frontend import errors
from openai_frontend.audio import SAMPLE_BYTES, base64_text
from openai_frontend.engine import Delta, Engine
from openai_frontend.realtime.config import SessionConfig, in_clients_words
from openai_frontend.realtime.conversation import Item, Part, Status, new_id
from openai_frontend.realtime.formats import Resampler
from openai_frontend.realtime.outputs import FunctionCalls, Output, Outputs, Remember, Send
from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import SAMPLE_RATE_HZ

logger = logging.getLogger(__name__)

CancelReason: TypeAlias = Literal["client_cancelled", "turn_detected"]
_NO_SAMPLES = np.zeros(0, np.int16)


class Answer:
    """``config``: as it was when the answer was asked for. ``remember``: as ``Outputs`` takes it. ``item``: what is
    said, as far as anything is.
    """

    def __init__(
        self,
        config: SessionConfig,
        send: Send,
        remember: Remember | None,
        conversation_id: str | None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.id = new_id("resp")
        self.item = Item(new_id("item"), "assistant", [], "in_progress")
        self._config = config
        self._send = send
        self._outputs = Outputs(self.id, send, remember)
        self._calls = FunctionCalls(self._outputs)
        self._message: Output | None = None
        self._conversation_id = conversation_id
        self._metadata = metadata
        self._part = Part("output_audio" if config.speaks else "output_text")
        self._resampler = Resampler(SAMPLE_RATE_HZ, config.output_format.rate_hz)
        self._first_audio_s: float | None = None
        self._audio_samples = 0
        self._usage: dict[str, int] = {}
        self._end: Mapping[str, Any] = {}
        self._cancel_reason: CancelReason | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Delta | None] | None = None

    @property
    def done(self) -> bool:
        return self._task is None or self._task.done()

    @property
    def audio_ms(self) -> int:
        return self._part.audio_ms

    @property
    def heard_ms(self) -> int:
        """What a listener can have heard by now who plays what comes as it comes."""
        if self._first_audio_s is None:
            return 0
        return min(self.audio_ms, int((time.monotonic() - self._first_audio_s) * 1000))

    def start(self, engine: Engine, wire: Mapping[str, Any], media: list[bytes], when_done: Callable[[], None]) -> None:
        self._task = asyncio.ensure_future(self._run(engine, wire, media))
        self._task.add_done_callback(lambda _: when_done())

    async def cancel(self, reason: CancelReason) -> None:
        """Returns when every stage has let go of it, and the client was told."""
        if self._task is not None and not self._task.done():
            self._cancel_reason = self._cancel_reason or reason
            if self._next is not None:
                self._next.cancel()
            await asyncio.wait([self._task])

    async def wait(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def abandon(self) -> None:
        """The client is gone: as ``cancel``, and tells nobody."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, engine: Engine, wire: Mapping[str, Any], media: list[bytes]) -> None:
        try:
            await self._send("response.created", response=self._json("in_progress"))
            await self._finish(await self._pass_on(engine.generate(wire, media)))
        except WebSocketDisconnect:
            logger.debug("%s: the client has left", self.id)

    async def _pass_on(self, answer: AsyncGenerator[Delta, None]) -> dict[str, Any]:
        """How it ended. Only the wait for a piece is cancelled, so that no event is left half sent."""
        try:
            async with aclosing(answer) as pieces:
                while self._cancel_reason is None:
                    self._next = asyncio.ensure_future(_next(pieces))
                    if (piece := await self._next) is None:
                        return self._ended()
                    await self._take(piece)
        except asyncio.CancelledError:
            if self._cancel_reason is None:
                raise
        except WebSocketDisconnect:
            raise
        except Exception as error:
            told = in_clients_words(error, "response") if isinstance(error, InvalidRequestError) else error
            described = errors.describe(told)[1]["error"]
            return {"type": "failed", "error": {key: described[key] for key in ("type", "code", "message")}}
        return {"type": "cancelled", "reason": self._cancel_reason}

    def _ended(self) -> dict[str, Any]:
        if self._end.get("finish_reason") == "length":
            return {"type": "incomplete", "reason": "max_output_tokens"}
        return {"type": "completed"}

    async def _take(self, piece: Delta) -> None:
        self._usage.update(piece.event.get("usage", {}))
        if piece.event.get("type") == "end":
            self._end = piece.event
        if (piece.text or piece.audio) and self._message is None:
            await self._begin()
        if piece.text:
            self._part.text += piece.text
            name = "output_audio_transcript" if self._config.speaks else "output_text"
            await self._send_of_part(f"response.{name}.delta", delta=piece.text)
        if piece.audio and self._config.speaks:
            await self._speak(piece.audio)
        if calls := piece.event.get("tool_calls"):
            await self._calls.take(calls)

    async def _speak(self, pcm: bytes) -> None:
        if self._first_audio_s is None:
            self._first_audio_s = time.monotonic()
        self._audio_samples += len(pcm) // SAMPLE_BYTES
        self._part.audio_ms = self._audio_samples * 1000 // SAMPLE_RATE_HZ
        await self._send_sound(self._resampler.push(np.frombuffer(pcm, "<i2")))

    async def _send_sound(self, samples: Any) -> None:
        if len(samples):
            sound = base64_text(self._config.output_format.encode(samples))
            await self._send_of_part("response.output_audio.delta", delta=sound)

    async def _begin(self) -> None:
        self._message = await self._outputs.open(self.item)
        self.item.parts.append(self._part)
        await self._send_of_part("response.content_part.added", part=self._part_json())

    async def _finish(self, status: dict[str, Any]) -> None:
        """The events that close what was opened; the last is response.done."""
        ended = status["type"]
        item_status: Status = "completed" if ended == "completed" else "incomplete"
        if self._message is not None:
            await self._finish_part()
            await self._outputs.close(self._message, item_status)
        await self._calls.finish(item_status)
        await self._send("response.done", response=self._json(ended, status))

    async def _finish_part(self) -> None:
        text = self._part.text
        if self._config.speaks:
            if self._cancel_reason is None:
                await self._send_sound(self._resampler.push(_NO_SAMPLES, last=True))
            await self._send_of_part("response.output_audio.done")
            await self._send_of_part("response.output_audio_transcript.done", transcript=text)
        else:
            await self._send_of_part("response.output_text.done", text=text)
        await self._send_of_part("response.content_part.done", part=self._part_json())

    def _part_json(self) -> dict[str, Any]:
        text = self._part.text
        return {"type": "audio", "transcript": text} if self._config.speaks else {"type": "text", "text": text}

    async def _send_of_part(self, event: str, **fields: Any) -> None:
        assert self._message is not None
        await self._outputs.send_of(self._message, event, item_id=self.item.id, content_index=0, **fields)

    def _json(self, status: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": self._outputs.json,
            "conversation_id": self._conversation_id,
            "output_modalities": self._config.output_modalities,
            "max_output_tokens": self._config.max_output_tokens_json,
            "audio": {"output": self._config.output_json},
            "usage": self._usage_json() if details else None,
            "metadata": self._metadata,
        }

    def _usage_json(self) -> dict[str, Any]:
        """Of what was cancelled, as far as its pieces told."""
        prompt, text = self._usage.get("prompt_tokens", 0), self._usage.get("text_tokens", 0)
        audio = self._usage.get("audio_frames", 0)
        return {
            "total_tokens": prompt + text + audio,
            "input_tokens": prompt,
            "output_tokens": text + audio,
            "output_token_details": {"text_tokens": text, "audio_tokens": audio},
        }


async def _next(pieces: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(pieces, None)
