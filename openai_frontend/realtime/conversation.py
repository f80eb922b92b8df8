"""The items of a conversation, as the client sees them and as messages for the model."""

from __future__ import annotations

import dataclasses
import secrets
import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from openai_frontend.audio import base64_text
from openai_frontend.realtime.formats import Samples, WireFormat, resampled
from openai_frontend.realtime.vad import RATE_HZ
from openai_frontend.tools import call_wire
from triton_omni.errors import InvalidRequestError, NotFoundError

Role: TypeAlias = Literal["system", "user", "assistant"]
Status: TypeAlias = Literal["completed", "incomplete", "in_progress"]
ROOT = "root"


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


@dataclasses.dataclass(slots=True)
class Part:
    """``type``: as in the protocol. ``text``: what is written or said. ``samples``: int16 [N] at 16 kHz of input_audio.
    ``image``: bytes of a file. Of output_audio: ``audio_ms`` of it exist, ``heard_ms`` were played (None: all).
    """

    type: str
    text: str = ""
    samples: Samples | None = None
    image: bytes = b""
    audio_ms: int = 0
    heard_ms: int | None = None

    @property
    def bytes(self) -> int:
        return len(self.text) + len(self.image) + (0 if self.samples is None else self.samples.nbytes)

    @property
    def heard_text(self) -> str:
        """The transcript up to where the listener heard, in proportion, and to the end of a word."""
        if self.heard_ms is None or self.heard_ms >= self.audio_ms:
            return self.text
        cut = len(self.text) * self.heard_ms // self.audio_ms
        heard = self.text[:cut]
        if " " in heard and not self.text[cut : cut + 1].isspace():
            heard = heard[: heard.rindex(" ")]
        return heard.rstrip()

    def json(self, audio_format: WireFormat | None) -> dict[str, Any]:
        """``audio_format``: that of the samples to show; None: none are shown."""
        match self.type:
            case "input_audio":
                shown: dict[str, Any] = {"type": self.type, "transcript": self.text or None}
                if audio_format is not None and self.samples is not None:
                    there = resampled(self.samples, RATE_HZ, audio_format.rate_hz)
                    shown["audio"] = base64_text(audio_format.encode(there))
                return shown
            case "output_audio":
                return {"type": self.type, "transcript": self.heard_text}
            case "input_image":
                return {"type": self.type}
        return {"type": self.type, "text": self.text}


@dataclasses.dataclass(slots=True)
class Item:
    id: str
    role: Role
    parts: list[Part]
    status: Status = "completed"

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def json(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        content = [part.json(audio_format) for part in self.parts]
        return {**_head(self, "message"), "role": self.role, "content": content}


@dataclasses.dataclass(slots=True)
class FunctionCall:
    """``arguments``: JSON text. What is not completed was broken off, and is no call for the model."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "completed"

    @property
    def bytes(self) -> int:
        return len(self.name) + len(self.arguments)

    def json(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        called = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {**_head(self, "function_call"), **called}


@dataclasses.dataclass(slots=True)
class FunctionOutput:
    """What a function returned."""

    id: str
    call_id: str
    output: str
    status: Status = "completed"

    @property
    def bytes(self) -> int:
        return len(self.output)

    def json(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        return {**_head(self, "function_call_output"), "call_id": self.call_id, "output": self.output}


AnyItem: TypeAlias = Item | FunctionCall | FunctionOutput


def _head(item: AnyItem, kind: str) -> dict[str, Any]:
    return {"id": item.id, "object": "realtime.item", "type": kind, "status": item.status}


class Conversation:
    """``max_bytes`` bounds what is remembered: the model is sent all of it each turn."""

    def __init__(self, max_bytes: int) -> None:
        self.id = new_id("conv")
        self.items: list[AnyItem] = []
        self._max_bytes = max_bytes

    def add(self, item: AnyItem, after: str | None = None) -> str | None:
        """Behind ``after`` ("root": in front; None: at the end); the id of the item before.

        Raises: InvalidRequestError, NotFoundError.
        """
        if any(known.id == item.id for known in self.items):
            raise InvalidRequestError("item.id", f"item.id: {item.id!r} is taken")
        if isinstance(item, FunctionOutput):
            self._check_call(item.call_id)
        if sum(known.bytes for known in self.items) + item.bytes > self._max_bytes:
            raise InvalidRequestError(
                "item", f"item: a conversation may hold {self._max_bytes} bytes; delete items that are no longer needed"
            )
        place = len(self.items)
        if after is not None:
            place = 0 if after == ROOT else self.items.index(self.get(after, "previous_item_id")) + 1
        self.items.insert(place, item)
        return self.items[place - 1].id if place else None

    def _check_call(self, call_id: str) -> None:
        """Raises: NotFoundError, InvalidRequestError for a second output of a call."""
        field = "item.call_id"
        if not any(isinstance(item, FunctionCall) and item.call_id == call_id for item in self.items):
            raise NotFoundError(field, f"{field}: the conversation has no call {call_id!r}")
        if any(isinstance(item, FunctionOutput) and item.call_id == call_id for item in self.items):
            raise InvalidRequestError(field, f"{field}: the call {call_id!r} has its output already")

    def get(self, item_id: str, field: str = "item_id") -> AnyItem:
        for item in self.items:
            if item.id == item_id:
                return item
        raise NotFoundError(field, f"{field}: the conversation has no item {item_id[:64]!r}")

    def truncate(self, item_id: str, content_index: int, heard_ms: int) -> None:
        """Raises: InvalidRequestError, NotFoundError."""
        item = self.get(item_id)
        parts = item.parts if isinstance(item, Item) else []
        if not 0 <= content_index < len(parts) or parts[content_index].type != "output_audio":
            raise InvalidRequestError("content_index", "content_index: must point at audio of an answer")
        part = parts[content_index]
        if heard_ms > part.audio_ms:
            raise InvalidRequestError(
                "audio_end_ms", f"audio_end_ms: the audio has {part.audio_ms} ms, cannot be cut at {heard_ms}"
            )
        part.heard_ms = heard_ms


def messages(items: Sequence[AnyItem], instructions: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Messages and media of omni_bls's request; answers of which nothing was heard are left out, and so are calls
    that were broken off, with their outputs.
    """
    media: list[bytes] = []
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    called: set[str] = set()
    for item in items:
        match item:
            case FunctionCall():
                if item.status == "completed":
                    called.add(item.call_id)
                    _add_call(found, item)
            case FunctionOutput():
                if item.call_id in called:
                    found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case Item(role="user"):
                found.append({"role": "user", "content": [_content(part, media) for part in item.parts]})
            case _:
                said = "".join(part.heard_text for part in item.parts)
                found += [{"role": item.role, "content": said}] if said else []
    return found, media


def _add_call(found: list[dict[str, Any]], call: FunctionCall) -> None:
    """Calls that follow each other, and what was said before them, are one message."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant"})
    found[-1].setdefault("tool_calls", []).append(call_wire(call.call_id, call.name, call.arguments))


def _content(part: Part, media: list[bytes]) -> dict[str, Any]:
    """Its file, if it has one, goes behind ``media``."""
    if part.type == "input_text":
        return {"type": "text", "text": part.text}
    media.append(part.image or wav_16k(part.samples))
    return {"type": "image" if part.image else "audio", "media": len(media) - 1}


def wav_16k(samples: Samples | None) -> bytes:
    """int16 samples at 16 kHz as a file."""
    pcm = b"" if samples is None else samples.astype("<i2", copy=False).tobytes()
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", 36 + len(pcm), b"WAVE"),
        *(b"fmt ", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16),
        *(b"data", len(pcm)),
    )
    return header + pcm
