"""omni_bls's requests and responses as tensors: REQUEST, MEDIA and CANCEL_KEY in, TEXT, AUDIO and EVENT out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from reprlib import repr as short
from typing import Any

import numpy as np

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.events import OmniEvent
from triton_omni.triton.tensors import (
    Arrays,
    array_tensor,
    constant_empty,
    constant_string,
    read_files,
    read_string,
    string_tensor,
)


def read_request(inputs: Arrays) -> tuple[str, tuple[bytes, ...], str]:
    """The JSON text, the files' bytes, and the cancel key ("" when there is none). Raises InvalidRequestError.

    An empty text with a key takes back the request that came with that key.
    """
    return read_string(inputs, "REQUEST"), read_files(inputs, "MEDIA"), read_string(inputs, "CANCEL_KEY")


SIGN_OF_LIFE = OmniEvent()
"""A response without text, audio and event."""
LIFE_PARAMETER = "sign_of_life_s"
"""The request parameter that asks for one every so many seconds, 1 or more."""


def read_life_parameter(parameters: str) -> int | None:
    """``parameters``: JSON, or empty. None: not asked for. Raises InvalidRequestError."""
    every_s = json.loads(parameters or "{}").get(LIFE_PARAMETER)
    if every_s is not None and (not isinstance(every_s, int) or isinstance(every_s, bool) or every_s < 1):
        raise InvalidRequestError(LIFE_PARAMETER, f"must be an integer of at least 1, got {short(every_s)}")
    return every_s


def event_tensors(events: Sequence[OmniEvent]) -> list[list[Any]]:
    """One response for all plain deltas that are ready together; start and end have responses of their own."""
    responses: list[list[Any]] = []
    plain: list[OmniEvent] = []
    for event in events:
        if event.info:
            responses += [*_joined(plain), _tensors(event)]
            plain = []
        else:
            plain.append(event)
    return [*responses, *_joined(plain)]


def _joined(plain: Sequence[OmniEvent]) -> list[list[Any]]:
    if not plain:
        return []
    if len(plain) == 1:
        return [_tensors(plain[0])]
    audio = np.concatenate([event.audio for event in plain])
    return [_tensors(OmniEvent(text="".join(event.text for event in plain), audio=audio))]


def _tensors(event: OmniEvent) -> list[Any]:
    return [
        string_tensor("TEXT", event.text) if event.text else constant_string("TEXT", ""),
        array_tensor("AUDIO", event.audio) if event.audio.size else constant_empty("AUDIO", np.int16),
        string_tensor("EVENT", event.info_json) if event.info else constant_string("EVENT", "{}"),
    ]
