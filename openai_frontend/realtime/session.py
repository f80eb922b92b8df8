"""One client's session: its events in, the conversation, turns of speech, and one answer at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.websockets import WebSocketDisconnect

from openai_frontend import errors
from openai_frontend.context import Context
from openai_frontend.realtime import schemas
from openai_frontend.realtime.answer import Answer
from openai_frontend.realtime.config import first_config, in_clients_words
from openai_frontend.realtime.conversation import (
    AnyItem,
    Conversation,
    Item,
    Part,
    messages,
    new_id,
)
from openai_frontend.realtime.formats import Samples
from openai_frontend.realtime.input_audio import InputAudio, SpeechStarted
from openai_frontend.realtime.items import from_base64, read_item
from openai_frontend.realtime.outputs import Send
from openai_frontend.realtime.vad import RATE_HZ
from triton_omni.errors import InvalidRequestError, OmniError

logger = logging.getLogger(__name__)

# As OpenAI's: less is a slip of the finger.
MIN_COMMIT_MS = 100


class ProtocolError(InvalidRequestError):
    """The event came at the wrong time; ``event_code`` says how, in OpenAI's words."""

    def __init__(self, event_code: str, message: str, field: str = "type") -> None:
        super().__init__(field, message)
        self.event_code = event_code


class RealtimeSession:
    """``send``: takes an event's type and fields; may be called by several tasks."""

    def __init__(self, context: Context, send: Send) -> None:
        self.id = new_id("sess")
        self._context = context
        self._send = send
        self._config = first_config(context)
        max_bytes = context.settings.max_media_bytes
        self._conversation = Conversation(context.settings.max_body_bytes)
        self._input = InputAudio(max_bytes // 2)
        self._input.configure(self._config.input_format, self._config.turn_rules)
        self._turn_item_id = new_id("item")  # of the turn that is being spoken, or the next
        self._answer: Answer | None = None
        self._answer_wanted = False
        self._background: set[asyncio.Task[None]] = set()

    async def serve(self, incoming: AsyncIterator[str | bytes]) -> None:
        """Until ``incoming`` ends; then nothing of the session is left running."""
        try:
            await self._send("session.created", session=self._json())
            async for text in incoming:
                await self._handle(text)
        except WebSocketDisconnect:
            pass
        finally:
            self._answer_wanted = False
            for task in self._background:
                task.cancel()
            if self._answer is not None:
                await self._answer.abandon()

    async def answered(self) -> None:
        """Returns when no answer is being made."""
        if self._answer is not None:
            await self._answer.wait()

    async def _handle(self, text: str | bytes) -> None:
        event_id: str | None = None
        try:
            try:
                body = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise ProtocolError("invalid_json", f"an event must be JSON: {error}", "body") from None
            if isinstance(body, dict) and isinstance(body.get("event_id"), str):
                event_id = body["event_id"][:512]
            await self._dispatch(schemas.parse_event(body))
        except OmniError as error:
            await self._send_error(error, event_id)

    async def _send_error(self, error: OmniError, event_id: str | None = None) -> None:
        told = errors.describe(error)[1]["error"]
        if isinstance(error, ProtocolError):
            told["code"] = error.event_code
        await self._send("error", error={**told, "event_id": event_id})

    async def _dispatch(self, event: Any) -> None:
        handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            schemas.SessionUpdate: self._update,
            schemas.AudioAppend: self._append,
            schemas.AudioCommit: self._commit,
            schemas.AudioClear: self._clear,
            schemas.ItemCreate: self._create_item,
            schemas.ItemDelete: self._delete_item,
            schemas.ItemRetrieve: self._retrieve_item,
            schemas.ItemTruncate: self._truncate_item,
            schemas.ResponseCreate: self._create_response,
            schemas.ResponseCancel: self._cancel_response,
        }
        await handlers[type(event)](event)

    async def _update(self, event: schemas.SessionUpdate) -> None:
        if event.session.model is not None:
            self._context.check_model(event.session.model)
        self._config = self._config.changed(event.session, self._context, "session")
        self._input.configure(self._config.input_format, self._config.turn_rules)
        await self._send("session.updated", session=self._json())

    async def _clear(self, event: schemas.AudioClear) -> None:
        self._input.clear()
        await self._send("input_audio_buffer.cleared")

    async def _create_item(self, event: schemas.ItemCreate) -> None:
        item = await read_item(event.item, "item", self._config.input_format, self._context)
        await self._announce(item, self._conversation.add(item, event.previous_item_id))

    async def _delete_item(self, event: schemas.ItemDelete) -> None:
        self._conversation.items.remove(self._conversation.get(event.item_id))
        await self._send("conversation.item.deleted", item_id=event.item_id)

    async def _retrieve_item(self, event: schemas.ItemRetrieve) -> None:
        item = self._conversation.get(event.item_id).json(self._config.input_format)
        await self._send("conversation.item.retrieved", item=item)

    async def _truncate_item(self, event: schemas.ItemTruncate) -> None:
        await self._truncate(event.item_id, event.content_index, event.audio_end_ms)

    async def _create_response(self, event: schemas.ResponseCreate) -> None:
        await self._respond(event.response or schemas.ResponseOptions())

    async def _cancel_response(self, event: schemas.ResponseCancel) -> None:
        answer = self._answer
        if answer is None or answer.done or event.response_id not in (None, answer.id):
            raise ProtocolError("response_cancel_not_active", "there is no active response to cancel", "response_id")
        await answer.cancel("client_cancelled")

    def _json(self) -> dict[str, Any]:
        return {"id": self.id, "model": self._context.settings.served_model, **self._config.json()}

    async def _append(self, event: schemas.AudioAppend) -> None:
        # In a thread: silero takes 0.2 ms for 32 ms, and an event may bring minutes.
        for change in await asyncio.to_thread(self._input.append, from_base64(event.audio, "audio")):
            if isinstance(change, SpeechStarted):
                await self._turn_started(change)
            else:
                await self._turn_stopped(change.end_ms, change.samples)

    async def _turn_started(self, change: SpeechStarted) -> None:
        await self._send(
            "input_audio_buffer.speech_started", audio_start_ms=change.start_ms, item_id=self._turn_item_id
        )
        if self._config.turn_detection and self._config.turn_detection.interrupt_response:
            await self._interrupt()

    async def _interrupt(self) -> None:
        """Somebody speaks into the answer: it ends in every stage, and what was not played was not said."""
        answer = self._answer
        if answer is None:
            return
        heard_ms = answer.heard_ms
        await answer.cancel("turn_detected")
        if heard_ms < answer.audio_ms and answer.item in self._conversation.items:
            await self._truncate(answer.item.id, 0, heard_ms)
        self._answer = None

    async def _turn_stopped(self, end_ms: int, samples: Samples) -> None:
        await self._send("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._turn_item_id)
        await self._add_spoken(samples)
        if self._config.turn_detection and self._config.turn_detection.create_response:
            await self._respond_when_free()

    async def _commit(self, event: schemas.AudioCommit) -> None:
        samples = self._input.take()
        if len(samples) * 1000 < MIN_COMMIT_MS * RATE_HZ:
            raise ProtocolError(
                "input_audio_buffer_commit_empty",
                f"the buffer holds {len(samples) * 1000 // RATE_HZ} ms of audio; a turn needs {MIN_COMMIT_MS}",
            )
        await self._add_spoken(samples)

    async def _add_spoken(self, samples: Samples) -> None:
        item = Item(self._turn_item_id, "user", [Part("input_audio", samples=samples)])
        self._turn_item_id = new_id("item")
        before = self._conversation.add(item)
        await self._send("input_audio_buffer.committed", previous_item_id=before, item_id=item.id)
        await self._announce(item, before)

    async def _announce(self, item: AnyItem, before: str | None) -> None:
        for event in ("conversation.item.added", "conversation.item.done"):
            await self._send(event, previous_item_id=before, item=item.json())

    async def _truncate(self, item_id: str, content_index: int, heard_ms: int) -> None:
        self._conversation.truncate(item_id, content_index, heard_ms)
        fields = {"item_id": item_id, "content_index": content_index, "audio_end_ms": heard_ms}
        await self._send("conversation.item.truncated", **fields)

    async def _respond(self, options: schemas.ResponseOptions) -> None:
        """Raises: InvalidRequestError for what the model could not answer, and while there is another answer."""
        config = self._config.changed(options, self._context, "response")
        items = self._conversation.items
        if options.input is not None:
            audio_format = self._config.input_format
            places = ((body, f"response.input[{i}]") for i, body in enumerate(options.input))
            items = [await read_item(body, place, audio_format, self._context) for body, place in places]
        # From here to the start nothing is awaited, so that two cannot both find the place free.
        if self._answer is not None and not self._answer.done:
            raise ProtocolError(
                "conversation_already_has_active_response",
                f"the response {self._answer.id} is active; wait until it is done, or cancel it",
            )
        remembered = options.conversation != "none"
        answer = Answer(
            config,
            self._send,
            self._conversation.add if remembered else None,
            self._conversation.id if remembered else None,
            options.metadata,
        )
        said, media = messages(items, config.instructions)
        wire = {**config.wire(said), "request_id": answer.id}
        try:
            self._context.parser.check(wire, media)
        except InvalidRequestError as error:
            raise in_clients_words(error, "response") from None
        self._answer = answer
        answer.start(self._context.engine, wire, media, self._answer_done)

    async def _respond_when_free(self) -> None:
        """The answer to a turn of speech; an answer that must not be interrupted is waited for."""
        if self._answer is not None and not self._answer.done:
            self._answer_wanted = True
            return
        await self._respond(schemas.ResponseOptions())

    def _answer_done(self) -> None:
        if self._answer_wanted:
            self._answer_wanted = False
            task = asyncio.ensure_future(self._respond_in_background())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _respond_in_background(self) -> None:
        try:
            await self._respond_when_free()
        except OmniError as error:
            await self._send_error(error)
