"""Checks the chat messages of a request and the files they point at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from triton_omni.errors import InvalidRequestError
from triton_omni.tools import check_keys, check_text

ROLES = ("system", "user", "assistant", "tool")
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
    open_calls: list[str] = []
    checked = tuple(_message(m, f"messages[{i}]", media, used, open_calls) for i, m in enumerate(messages))
    for index in range(len(media)):
        if index not in used:
            raise InvalidRequestError("media", f"file {index} of {len(media)} is not used by any message part")
    return checked


def _message(
    message: Any, where: str, media: Sequence[bytes], used: set[int], open_calls: list[str]
) -> Mapping[str, Any]:
    """``open_calls``: the ids of earlier calls that have no answer yet."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role == "tool":
        check_keys(message, where, ("role", "content", "tool_call_id"))
        call_id = _answered(message["tool_call_id"], f"{where}.tool_call_id", open_calls)
        content = _content(message["content"], f"{where}.content", role, media, used)
        return {"role": role, "content": content, "tool_call_id": call_id}
    if role == "assistant" and message.get("tool_calls") is not None:
        return _calling_message(message, where, media, used, open_calls)
    check_keys(message, where, ("role", "content"), ("tool_calls",) if role == "assistant" else ())
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {short(role)}")
    return {"role": role, "content": _content(message["content"], f"{where}.content", role, media, used)}


def _calling_message(
    message: Mapping[str, Any], where: str, media: Sequence[bytes], used: set[int], open_calls: list[str]
) -> Mapping[str, Any]:
    """An assistant's message with calls, whose content may be null or absent."""
    check_keys(message, where, ("role", "tool_calls"), ("content",))
    content: Any = ""
    if message.get("content") is not None:
        content = _content(message["content"], f"{where}.content", "assistant", media, used)
    calls, where = message["tool_calls"], f"{where}.tool_calls"
    if not isinstance(calls, (list, tuple)) or not calls:
        raise InvalidRequestError(where, f"must be left out or a non-empty list of calls, got {short(calls)}")
    ids: list[str] = []
    for i, call in enumerate(calls):
        ids.append(_check_call(call, f"{where}[{i}]"))
        if ids[-1] in ids[:-1]:
            raise InvalidRequestError(f"{where}[{i}].id", f"must be another for each call, got {short(ids[-1])} twice")
    open_calls += ids
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _check_call(call: Any, where: str) -> str:
    """The call's id."""
    check_keys(call, where, ("id", "type", "function"))
    if call["type"] != "function":
        raise InvalidRequestError(f"{where}.type", f"must be 'function', got {short(call['type'])}")
    check_keys(call["function"], f"{where}.function", ("name", "arguments"))
    check_text(call["function"]["name"], f"{where}.function.name")
    check_text(call["function"]["arguments"], f"{where}.function.arguments")
    return check_text(call["id"], f"{where}.id")


def _answered(call_id: Any, where: str, open_calls: list[str]) -> str:
    if call_id not in open_calls:
        calls = ", ".join(map(short, open_calls)) or "there is none"
        raise InvalidRequestError(
            where, f"must be the id of an earlier call that has no answer yet ({calls}), got {short(call_id)}"
        )
    open_calls.remove(call_id)
    return str(call_id)


def _content(content: Any, where: str, role: str, media: Sequence[bytes], used: set[int]) -> str | list[Any]:
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, (list, tuple)) or not content:
        raise InvalidRequestError(
            where, f"must be a string or a non-empty list of parts {_PARTS}, got {short(content)}"
        )
    return [_part(part, f"{where}[{i}]", role, media, used) for i, part in enumerate(content)]


def _part(part: Any, where: str, role: str, media: Sequence[bytes], used: set[int]) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(where, f"must be {_PARTS}, got {short(part)}")
    kind = part.get("type")
    if kind not in _PART_TYPES:
        raise InvalidRequestError(f"{where}.type", f"must be one of {', '.join(_PART_TYPES)}, got {short(kind)}")
    if kind == "text":
        check_keys(part, where, ("type", "text"))
        return {"type": "text", "text": check_text(part["text"], f"{where}.text")}
    if role != "user":
        raise InvalidRequestError(f"{where}.type", f"must be 'text' in a {role} message; {kind} belongs to a user's")
    check_keys(part, where, ("type", "media"))
    index = part["media"]
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(media):
        accepted = f"the index of a file, 0 to {len(media) - 1}" if media else "left out: the request brings no files"
        raise InvalidRequestError(f"{where}.media", f"must be {accepted}, got {short(index)}")
    if not media[index]:
        raise InvalidRequestError(f"{where}.media", f"file {index} is empty")
    used.add(index)
    return {"type": kind, "media": index}
