"""Speech to text: the model is asked to write down what it hears, or to translate it into English.

It tells no times, no segments and not which language it heard; nothing of that is made up.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import av
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from openai_frontend import errors
from openai_frontend.audio_schemas import LANGUAGES, TranscriptionForm, TranslationForm
from openai_frontend.completions import Reword
from openai_frontend.context import Context
from openai_frontend.engine import Delta
from openai_frontend.events import event
from openai_frontend.translate import Translation, checked
from triton_omni.errors import InvalidRequestError, OmniError

_MAX_FIELDS = 32
# Fast speech has 5 to 10 tokens a second, by language.
_MAX_TOKENS_PER_SECOND = 20
_SPARE_TOKENS = 256
# Only self-contained files: a playlist would make FFmpeg open what it names.
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,wav,flac,mp3,aac"


async def read_form(
    request: Request, form_type: type[TranslationForm], max_file_bytes: int
) -> tuple[TranslationForm, bytes]:
    """The fields and the file of a multipart body. Raises: InvalidRequestError naming the field."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequestError("body", "the body must be multipart/form-data with the parts file and model")
    values: dict[str, Any] = {}
    async with request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
        for name, value in form.multi_items():
            if name in values and not name.endswith("[]"):
                raise InvalidRequestError(name, f"{name}: is given twice; send it once")
            values[name] = value
        content = await _content(values.pop("file", None), max_file_bytes)
    fields = {name.removesuffix("[]"): value for name, value in values.items()}
    for name, value in fields.items():
        if isinstance(value, UploadFile):
            raise InvalidRequestError(name, f"{name}: must be a text, not a file")
    try:
        return form_type.model_validate(fields), content
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise errors.validation_error(problems, fields) from None


async def _content(file: Any, max_bytes: int) -> bytes:
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("file", "file: is missing; send the audio as a part with a file name")
    if (file.size or 0) > max_bytes:
        raise InvalidRequestError("file", f"file: is larger than the {max_bytes} bytes a file may have")
    content = await file.read()
    if not content:
        raise InvalidRequestError("file", "file: holds no data; send a whole audio file")
    return content


def translate_form(form: TranslationForm, content: bytes, duration_s: float | None, context: Context) -> Translation:
    """``duration_s``: of the sound, None where that cannot be read off the file.

    Raises: InvalidRequestError in the client's field names, NotFoundError for another model.
    """
    context.check_model(form.model)
    if form.stream and form.response_format != "json":
        raise InvalidRequestError("response_format", "response_format: must be json with stream; leave it out")
    if isinstance(form, TranscriptionForm) and form.response_format == "verbose_json" and form.language is None:
        raise InvalidRequestError(
            "language", "language: is missing: verbose_json tells the language, and the model does not; or ask for json"
        )
    if form.response_format == "verbose_json" and duration_s is None:
        raise InvalidRequestError("file", "file: does not tell how long it is, which verbose_json needs; ask for json")
    max_tokens = context.config.context_tokens
    if duration_s is not None:  # a model that repeats itself must not fill its context
        max_tokens = min(max_tokens, _SPARE_TOKENS + int(duration_s * _MAX_TOKENS_PER_SECOND))
    text = _task(form) + (f"\nNames, style and what came before: {form.prompt}" if form.prompt else "")
    content_parts = [{"type": "audio", "media": 0}, {"type": "text", "text": text}]
    wire = {
        "messages": [{"role": "user", "content": content_parts}],
        "modalities": ["text"],
        "thinker": {"temperature": form.temperature, "max_tokens": max_tokens},
    }
    places = ("media[0]", "messages", "messages[0].content[0]", "messages[0].content[0].media")
    return checked(Translation(wire, [content], True, None, dict.fromkeys(places, "file")), context)


def _task(form: TranslationForm) -> str:
    """As Qwen3-Omni's own examples ask."""
    if not isinstance(form, TranscriptionForm):
        return "Listen to the provided speech and produce a translation in English text."
    return f"Transcribe the {LANGUAGES[form.language]} audio into text." if form.language else _ANY_LANGUAGE


_ANY_LANGUAGE = "Transcribe the audio into text."


def length_s(content: bytes) -> float | None:
    """How long the sound of a file is, by its packets; None when they do not tell."""
    try:
        with av.open(io.BytesIO(content), options={"format_whitelist": _CONTAINERS}) as container:
            stream = container.streams.audio[0]
            ends = [p.pts + (p.duration or 0) for p in container.demux(stream) if p.pts is not None]
            length = float((max(ends) - (stream.start_time or 0)) * stream.time_base)
    except (av.FFmpegError, IndexError, ValueError, TypeError):  # TypeError: a stream without a clock
        return None
    return length if length > 0 else None


async def whole(pieces: AsyncGenerator[Delta, None]) -> tuple[str, Mapping[str, Any]]:
    """The text, and the end event's counts."""
    text: list[str] = []
    end: Mapping[str, Any] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            text.append(piece.text)
            end = piece.event or end
    return "".join(text), end["usage"]


def verbose(form: TranslationForm, text: str, duration_s: float) -> dict[str, Any]:
    """verbose_json without segments and words, which the model does not tell."""
    task, language = ("translate", "english")
    if isinstance(form, TranscriptionForm):
        task, language = "transcribe", LANGUAGES[form.language or ""].lower()
    usage = {"type": "duration", "seconds": duration_s}
    return {"task": task, "language": language, "duration": duration_s, "text": text, "usage": usage}


async def server_sent_events(first: Delta, rest: AsyncIterator[Delta], reword: Reword) -> AsyncGenerator[bytes, None]:
    """transcript.text.delta events, then transcript.text.done; or, as the last one, an error."""
    text = [first.text]
    end = first.event
    try:
        if first.text:
            yield event({"type": "transcript.text.delta", "delta": first.text})
        async for piece in rest:
            if piece.text:
                text.append(piece.text)
                yield event({"type": "transcript.text.delta", "delta": piece.text})
            end = piece.event or end
        yield event({"type": "transcript.text.done", "text": "".join(text), "usage": usage(end["usage"])})
    except Exception as error:
        _, body = errors.describe(reword(error) if isinstance(error, OmniError) else error)
        yield event(body)


def usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    read, written = counts["prompt_tokens"], counts["text_tokens"]
    return {"type": "tokens", "input_tokens": read, "output_tokens": written, "total_tokens": read + written}
