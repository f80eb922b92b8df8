"""Checks the chat messages of a request and the files they point at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from triton_omni.errors import InvalidRequestError
from triton_omni.options import unknown_key_message

ROLES = ("system", "user", "assistant")
MEDIA_TYPES = ("audio", "image", "video")
_PART_TYPES = ("text", *MEDIA_TYPES)
_PARTS = '{"type": "text", "text": …} or {"type": "audio" | "image" | "video", "media": index}'


def check_messages(messages: Any, media: Sequence[bytes]) -> tuple[Mapping[str, Any], ...]:
    """The messages as ThinkerRequest takes them. Every file of ``media`` must be used and hold at least one byte.

    Raises: InvalidRequestError naming the path of what is wrong.
    """
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError("messages", f"must be a list, got {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError("messages", "must hold at least one message")
    used: set[int] = set()
    checked = tuple(_message(m, f"messages[{i}]", media, used) for i, m in enumerate(messages))
    for index in range(len(media)):
        if index not in used:
            raise InvalidRequestError("media", f"file {index} of {len(media)} is not used by any message part")
    return checked


def _message(message: Any, where: str, media: Sequence[bytes], used: set[int]) -> Mapping[str, Any]:
    _check_keys(message, where, ("role", "content"))
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {short(role)}")
    where = f"{where}.content"
    if isinstance(content, str):
        return {"role": role, "content": _text(content, where)}
    if not isinstance(content, (list, tuple)) or not content:
        raise InvalidRequestError(
            where, f"must be a string or a non-empty list of parts {_PARTS}, got {short(content)}"
        )
    parts = [_part(part, f"{where}[{i}]", role, media, used) for i, part in enumerate(content)]
    return {"role": role, "content": parts}


def _part(part: Any, where: str, role: str, media: Sequence[bytes], used: set[int]) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(where, f"must be {_PARTS}, got {short(part)}")
    kind = part.get("type")
    if kind not in _PART_TYPES:
        raise InvalidRequestError(f"{where}.type", f"must be one of {', '.join(_PART_TYPES)}, got {short(kind)}")
    if kind == "text":
        _check_keys(part, where, ("type", "text"))
        return {"type": "text", "text": _text(part["text"], f"{where}.text")}
    if role != "user":
        raise InvalidRequestError(f"{where}.type", f"must be 'text' in a {role} message; {kind} belongs to a user's")
    _check_keys(part, where, ("type", "media"))
    index = part["media"]
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(media):
        accepted = f"the index of a file, 0 to {len(media) - 1}" if media else "left out: the request brings no files"
        raise InvalidRequestError(f"{where}.media", f"must be {accepted}, got {short(index)}")
    if not media[index]:
        raise InvalidRequestError(f"{where}.media", f"file {index} is empty")
    used.add(index)
    return {"type": kind, "media": index}


def _check_keys(value: Any, where: str, keys: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, f"must be an object with {' and '.join(keys)}, got {short(value)}")
    for key in value:
        if key not in keys:
            raise InvalidRequestError(f"{where}.{key}", unknown_key_message(str(key), keys))
    for key in keys:
        if key not in value:
            raise InvalidRequestError(f"{where}.{key}", "is missing")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(where, f"must be a string, got {short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(where, "must be valid Unicode; it holds half of a surrogate pair") from None
    return value
