"""A chat completion request in omni_bls's own JSON, and the names of its fields back again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from openai_frontend import media
from openai_frontend.context import Context
from openai_frontend.schemas import (
    AssistantMessage,
    AudioUrlPart,
    ChatCompletionRequest,
    ImageUrlPart,
    InputAudioPart,
    Message,
    Part,
    TextPart,
)
from triton_omni.errors import InvalidRequestError, OmniError

_THINKER_FIELDS = (
    *("temperature", "top_p", "top_k", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "stop_token_ids", "seed"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """``wire``: REQUEST of omni_bls; ``media``: the files its parts point at by index. ``wants_text``: text is among
    the modalities; ``audio_format``: None when no speech is asked for. ``names``: the wire's field names in the
    client's words where they differ.
    """

    wire: dict[str, Any]
    media: list[bytes]
    wants_text: bool
    audio_format: str | None
    names: Mapping[str, str]

    def in_clients_words(self, error: OmniError) -> OmniError:
        """The same error about the field as the client wrote it."""
        if isinstance(error, InvalidRequestError):
            field = str(error.field).removeprefix("thinker.")
            return _named(type(error)(self.names.get(field.lower(), field), error.message))
        return error


def translate(body: ChatCompletionRequest, context: Context) -> Translation:
    """Checked by the runtime's own parser, so what it would refuse is refused before any stage works.

    Raises: InvalidRequestError in the client's field names, NotFoundError for another model.
    """
    try:
        translation = _translate(body, context)
    except InvalidRequestError as error:
        raise _named(error) from None
    return checked(translation, context)


def checked(translation: Translation, context: Context) -> Translation:
    """As it is, once the runtime's parser has accepted it. Raises: InvalidRequestError in the client's field names."""
    try:
        context.parser.check(translation.wire, translation.media)
    except InvalidRequestError as error:
        raise translation.in_clients_words(error) from None
    return translation


def _named(error: InvalidRequestError) -> InvalidRequestError:
    """With the field at the head of the message: it must be told also by clients that show only the message."""
    field = str(error.field)
    return error if error.message.startswith(f"{field}:") else type(error)(field, f"{field}: {error.message}")


def _translate(body: ChatCompletionRequest, context: Context) -> Translation:
    context.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "has no effect without stream: true")
    modalities = _modalities(body)
    files = _Files(context.settings.max_media_bytes)
    speaker_name, speaker = _speaker(body)
    limit_name, max_tokens = _max_tokens(body)
    thinker = {name: getattr(body, name) for name in _THINKER_FIELDS} | {"max_tokens": max_tokens}
    if body.stop is not None:
        thinker["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    talker = body.talker.model_dump() if body.talker else {}
    if "audio" in modalities and talker.get("seed") is None:
        talker["seed"] = body.seed  # one seed: one text and one voice
    wire = {
        "messages": [_message(message, f"messages[{i}]", files) for i, message in enumerate(body.messages)],
        "modalities": modalities,
        "speaker": speaker,
        "thinker": given(thinker),
        "talker": given(talker),
        "chunk_frames": body.chunk_frames,
    }
    audio_format = (body.audio and body.audio.format) or ("pcm16" if body.stream else "wav")
    return Translation(
        wire=given(wire),
        media=files.contents,
        wants_text="text" in modalities,
        audio_format=audio_format if "audio" in modalities else None,
        names=files.names | {"speaker": speaker_name, "max_tokens": limit_name},
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the client has set; every default is the runtime's."""
    return {key: value for key, value in values.items() if value is not None and value != {}}


def _modalities(body: ChatCompletionRequest) -> list[str]:
    """Text unless asked otherwise; ``audio`` without modalities asks for both."""
    modalities = list(body.modalities or (["text", "audio"] if body.audio else ["text"]))
    for name in ("audio", "speaker", "talker", "chunk_frames"):
        if "audio" not in modalities and getattr(body, name) is not None:
            raise InvalidRequestError(name, "has no effect without 'audio' in modalities; add it or leave this out")
    return modalities


def _speaker(body: ChatCompletionRequest) -> tuple[str, str | None]:
    """The client's name for the voice's field, and the voice."""
    voice = body.audio.voice if body.audio else None
    if body.speaker is None:
        return "audio.voice", voice
    if voice is not None and voice.lower() != body.speaker.lower():
        raise InvalidRequestError("speaker", f"contradicts audio.voice ({voice!r}); send one of them")
    return "speaker", body.speaker


def _max_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """The client's name for the limit, and the limit."""
    if body.max_completion_tokens is None:
        return "max_tokens", body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("max_tokens", "contradicts max_completion_tokens; send one of them")
    return "max_completion_tokens", body.max_completion_tokens


class _Files:
    """The files of a request in the order of their parts, and where the client put each."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.contents: list[bytes] = []
        self.names: dict[str, str] = {}

    def add(self, content: bytes, place: str) -> int:
        index = len(self.contents)
        self.contents.append(content)
        self.names |= {f"media[{index}]": place, f"{place}.media": place}
        return index


def _message(message: Message, place: str, files: _Files) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        content = _former_transcript(message, place)
    if isinstance(content, str):
        return {"role": role, "content": content}
    return {"role": role, "content": [_part(p, f"{place}.content[{i}]", files) for i, p in enumerate(content)]}


def _former_transcript(message: Message, place: str) -> str:
    """What the assistant said, where its message carries only the audio."""
    audio = message.audio if isinstance(message, AssistantMessage) else None
    if audio is None:
        raise InvalidRequestError(f"{place}.content", "must hold what the assistant said")
    if audio.transcript is None:
        raise InvalidRequestError(
            f"{place}.audio", "answers are not kept by id; send the answer's transcript as content or audio.transcript"
        )
    return audio.transcript


def _part(part: Part, place: str, files: _Files) -> dict[str, Any]:
    limit = files.max_bytes
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case InputAudioPart():
            content = media.from_base64(part.input_audio.data, field=f"{place}.input_audio.data", max_bytes=limit)
            return {"type": "audio", "media": files.add(content, place)}
        case AudioUrlPart():
            field = f"{place}.audio_url.url"
            content = media.from_url(part.audio_url.url, "audio", field=field, max_bytes=limit)
            return {"type": "audio", "media": files.add(content, place)}
        case ImageUrlPart():
            field = f"{place}.image_url.url"
            content = media.from_url(part.image_url.url, "image", field=field, max_bytes=limit)
            return {"type": "image", "media": files.add(content, place)}
