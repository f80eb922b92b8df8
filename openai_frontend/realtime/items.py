"""Items of a conversation from what a client sends."""

from __future__ import annotations

import asyncio
import binascii
from typing import Any

from openai_frontend.context import Context
from openai_frontend.media import Budget
from openai_frontend.realtime import item_schemas as schemas
from openai_frontend.realtime.conversation import AnyItem, FunctionCall, FunctionOutput, Item, Part, new_id
from openai_frontend.realtime.formats import WireFormat, resampled
from openai_frontend.realtime.vad import RATE_HZ
from triton_omni.errors import InvalidRequestError


async def read_item(body: schemas.ItemBody, place: str, audio_format: WireFormat, context: Context) -> AnyItem:
    """``place``: where the client put it; ``audio_format``: that of its samples.

    Raises: InvalidRequestError naming the field from ``place`` on.
    """
    item_id = body.id or new_id("item")
    match body:
        case schemas.FunctionCallItem():
            return FunctionCall(item_id, body.call_id or new_id("call"), body.name, body.arguments)
        case schemas.FunctionCallOutputItem():
            return FunctionOutput(item_id, body.call_id, body.output)
    places = ((part, f"{place}.content[{i}]") for i, part in enumerate(body.content))
    return Item(item_id, body.role, [await _part(part, there, audio_format, context) for part, there in places])


async def _part(part: Any, place: str, audio_format: WireFormat, context: Context) -> Part:
    match part:
        case schemas.InputAudio():
            data = from_base64(part.audio, f"{place}.audio")
            there = audio_format.decode(data[: len(data) - len(data) % audio_format.sample_bytes])
            if not len(there):
                raise InvalidRequestError(f"{place}.audio", f"{place}.audio: holds no sample")
            samples = await asyncio.to_thread(resampled, there, audio_format.rate_hz, RATE_HZ)
            return Part(part.type, part.transcript or "", samples=samples)
        case schemas.InputImage():
            limit = context.settings.max_media_bytes
            budget, field = Budget(limit, limit), f"{place}.image_url"
            source = context.media.from_url(part.image_url, "image", field=field, budget=budget)
            (image,) = await context.media.load([source], budget)
            return Part(part.type, image=image)
        case schemas.OutputAudio():
            return Part("output_text", part.transcript)
    return Part("output_text" if isinstance(part, schemas.OutputText) else part.type, part.text)


def from_base64(data: str, field: str) -> bytes:
    """Raises: InvalidRequestError naming ``field``."""
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        raise InvalidRequestError(field, f"{field}: must be base64: {error}") from None
