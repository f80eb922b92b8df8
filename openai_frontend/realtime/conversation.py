"""The items of a conversation, as the client sees them and as messages for the model."""

from __future__ import annotations

import dataclasses
import secrets
import struct
from typing import Any, Literal

from openai_frontend.audio import base64_text
from openai_frontend.realtime.formats import Samples, WireFormat, resampled
from openai_frontend.realtime.vad import RATE_HZ
from triton_omni.errors import InvalidRequestError, NotFoundError

Role = Literal["system", "user", "assistant"]
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
    status: Literal["completed", "incomplete", "in_progress"] = "completed"

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def json(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": [part.json(audio_format) for part in self.parts],
        }


class Conversation:
    """``max_bytes`` bounds what is remembered: the model is sent all of it each turn."""

    def __init__(self, max_bytes: int) -> None:
        self.id = new_id("conv")
        self.items: list[Item] = []
        self._max_bytes = max_bytes

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Behind ``after`` ("root": in front; None: at the end); the id of the item before.

        Raises: InvalidRequestError, NotFoundError.
        """
        if any(known.id == item.id for known in self.items):
            raise InvalidRequestError("item.id", f"item.id: {item.id!r} is taken")
        if sum(known.bytes for known in self.items) + item.bytes > self._max_bytes:
            raise InvalidRequestError(
                "item", f"item: a conversation may hold {self._max_bytes} bytes; delete items that are no longer needed"
            )
        place = len(self.items)
        if after is not None:
            place = 0 if after == ROOT else self.items.index(self.get(after, "previous_item_id")) + 1
        self.items.insert(place, item)
        return self.items[place - 1].id if place else None

    def get(self, item_id: str, field: str = "item_id") -> Item:
        for item in self.items:
            if item.id == item_id:
                return item
        raise NotFoundError(field, f"{field}: the conversation has no item {item_id[:64]!r}")

    def truncate(self, item_id: str, content_index: int, heard_ms: int) -> None:
        """Raises: InvalidRequestError, NotFoundError."""
        parts = self.get(item_id).parts
        if not 0 <= content_index < len(parts) or parts[content_index].type != "output_audio":
            raise InvalidRequestError("content_index", "content_index: must point at audio of an answer")
        part = parts[content_index]
        if heard_ms > part.audio_ms:
            raise InvalidRequestError(
                "audio_end_ms", f"audio_end_ms: the audio has {part.audio_ms} ms, cannot be cut at {heard_ms}"
            )
        part.heard_ms = heard_ms


def messages(items: list[Item], instructions: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Messages and media of omni_bls's request; answers of which nothing was heard are left out."""
    media: list[bytes] = []
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if item.role != "user":
            said = "".join(part.heard_text for part in item.parts)
            found += [{"role": item.role, "content": said}] if said else []
            continue
        content: list[dict[str, Any]] = []
        for part in item.parts:
            if part.type == "input_text":
                content.append({"type": "text", "text": part.text})
                continue
            content.append({"type": "image" if part.image else "audio", "media": len(media)})
            media.append(part.image or wav_16k(part.samples))
        found.append({"role": "user", "content": content})
    return found, media


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
