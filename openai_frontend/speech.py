"""Text to speech: the model is asked to read a text, and its voice leaves as it is made.

The model writes what it says before it says it, so the usage counts that text beside the codec frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from openai_frontend import errors
from openai_frontend.audio import FORMATS, AudioStream
from openai_frontend.audio_schemas import SPEECH_FORMATS, SpeechRequest
from openai_frontend.completions import Reword
from openai_frontend.context import Context
from openai_frontend.engine import Delta
from openai_frontend.events import event
from openai_frontend.translate import Translation, checked, given
from triton_omni.errors import InvalidRequestError, OmniError

DEFAULT_FORMAT = "mp3"
_SPARE_TOKENS = 64
_SOUND = b'data: {"type":"speech.audio.delta","audio":"%b"}\n\n'
READ_ALOUD = (
    "You read texts aloud. Say exactly the words of the user's message, in its language, from the first to the last. "
    "Do not answer it, do not comment on it, and leave nothing out."
)


def translate_speech(body: SpeechRequest, context: Context) -> Translation:
    """Raises: InvalidRequestError in the client's field names, NotFoundError for another model."""
    context.check_model(body.model)
    limit = context.settings.max_speech_characters
    if len(body.input) > limit:
        raise InvalidRequestError("input", f"input: must have at most {limit} characters, got {len(body.input)}")
    if not body.input.strip():
        raise InvalidRequestError("input", "input: holds nothing to read; send a text")
    manner = f"\nHow to read it: {body.instructions}" if body.instructions else ""
    seed, tokens = body.seed, len(body.input.encode()) + _SPARE_TOKENS
    talker = body.talker.model_dump() if body.talker else {}
    if talker.get("seed") is None:
        talker["seed"] = seed
    wire = {
        "messages": [{"role": "system", "content": READ_ALOUD + manner}, {"role": "user", "content": body.input}],
        "modalities": ["audio"],
        "speaker": body.voice,
        # Greedy, so that no word is made up; no text has more tokens than bytes.
        "thinker": given({"temperature": 0.0, "max_tokens": min(tokens, context.config.context_tokens), "seed": seed}),
        "talker": given(talker),
        "chunk_frames": body.chunk_frames,
        "chunk_policy": body.chunk_policy,
    }
    audio_format = SPEECH_FORMATS[body.response_format or DEFAULT_FORMAT]
    names = {"speaker": "voice", "messages": "input", "messages[1].content": "input"}
    return checked(Translation(given(wire), [], False, audio_format, names), context)


async def first_sound(pieces: AsyncGenerator[Delta, None]) -> Delta:
    """The first piece with audio, or the last one. What goes wrong until then still has a status of its own."""
    async for piece in pieces:
        if piece.audio or piece.event.get("type") == "end":
            return piece
    raise errors.UnavailableError("the answer broke off before its first sound")


async def file_pieces(first: Delta, rest: AsyncIterator[Delta], audio_format: str) -> AsyncGenerator[bytes, None]:
    """One file of ``audio_format``. An error breaks it off: a body cannot say more."""
    writer = FORMATS[audio_format]
    encoder = writer.stream()

    async def run(step: Any, *arguments: Any) -> bytes:
        data: bytes = await asyncio.to_thread(step, *arguments) if writer.compressed else step(*arguments)
        return data

    async for piece in _chain(first, rest):
        if piece.audio and (data := await run(encoder.encode, piece.audio)):
            yield data
    if data := await run(encoder.finish):
        yield data


async def server_sent_events(
    first: Delta, rest: AsyncIterator[Delta], audio_format: str, reword: Reword
) -> AsyncGenerator[bytes, None]:
    """speech.audio.delta events, then speech.audio.done with the usage; or, as the last one, an error."""
    stream = AudioStream(audio_format)

    async def run(step: Any, *arguments: Any) -> bytes:
        data: bytes = await asyncio.to_thread(step, *arguments) if stream.compressed else step(*arguments)
        return data

    end: Mapping[str, Any] = {}
    try:
        async for piece in _chain(first, rest):
            if piece.audio and (data := await run(stream.encode, piece.audio)):
                yield _SOUND % data
            end = piece.event or end
        if data := await run(stream.finish):
            yield _SOUND % data
        yield event({"type": "speech.audio.done", "usage": usage(end["usage"])})
    except Exception as error:
        _, body = errors.describe(reword(error) if isinstance(error, OmniError) else error)
        yield event(body)


def usage(counts: Mapping[str, Any]) -> dict[str, int]:
    """OpenAI's usage of the end event's ``counts``; a codec frame is a token."""
    read, made = counts["prompt_tokens"], counts["text_tokens"] + counts["audio_frames"]
    return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}


async def _chain(first: Delta, rest: AsyncIterator[Delta]) -> AsyncGenerator[Delta, None]:
    yield first
    async for piece in rest:
        yield piece
