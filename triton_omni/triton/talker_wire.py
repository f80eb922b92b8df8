"""The talker's requests and responses as tensors, both ways.

A session is a Triton sequence. START opens it: REQUEST {speaker, sampling, chunk_frames, chunk_policy},
PROMPT_TOKEN_IDS, for media prompts PROMPT_POSITIONS, ROWS and ROWS_DTYPE, and the first TOKEN_IDS; its response stream
carries all CODES. Later requests append TOKEN_IDS, with TEXT_FINISHED among the last, and answer nothing. END closes
the sequence; CANCEL with it ends the session at once, otherwise no text follows. START and END in one request is a
whole session.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from triton_omni.errors import InvalidRequestError
from triton_omni.options import from_mapping
from triton_omni.pipeline.chunk_policy import ChunkPlan
from triton_omni.pipeline.stages import CodesEvent, FinishReason, Int32, TalkerStart
from triton_omni.sampling import TalkerSampling
from triton_omni.triton.tensors import (
    Arrays,
    array_tensor,
    constant_string,
    flag_tensor,
    read_flag,
    read_ids,
    read_json,
    read_object,
    read_string,
    string_tensor,
)
from triton_omni.triton.thinker_wire import read_rows, rows_tensors

OUTPUTS = ("CODES", "FINISH_REASON")
_KEYS = ("speaker", "sampling", "chunk_frames", "chunk_policy")


@dataclasses.dataclass(frozen=True, slots=True)
class TalkerDefaults:
    """What a START gets that does not say."""

    speaker: str
    sampling: TalkerSampling
    plan: ChunkPlan = dataclasses.field(default_factory=ChunkPlan)


@dataclasses.dataclass(frozen=True, slots=True)
class TalkerAppend:
    """A request of an open session. ``text_finished``: no text follows these ids; ``cancel``: end the session."""

    token_ids: Int32
    text_finished: bool
    cancel: bool


def start_tensors(start: TalkerStart) -> list[Any]:
    """The request that opens a session."""
    content = {
        "speaker": start.speaker,
        "sampling": dataclasses.asdict(start.sampling),
        "chunk_frames": start.chunk_frames,
        "chunk_policy": start.chunk_policy,
    }
    return [
        string_tensor("REQUEST", json.dumps(content)),
        array_tensor("PROMPT_TOKEN_IDS", start.prompt_token_ids),
        *(rows_tensors(start.prompt_rows) if start.prompt_rows is not None else ()),
        *append_tensors(start.token_ids, start.text_finished),
    ]


def append_tensors(token_ids: Int32, text_finished: bool) -> list[Any]:
    """A request that gives an open session more of the answer."""
    return [array_tensor("TOKEN_IDS", token_ids), flag_tensor("TEXT_FINISHED", text_finished)]


def cancel_tensors() -> list[Any]:
    """The request that, with END, takes a session back."""
    return [flag_tensor("CANCEL", True)]


def read_start(inputs: Arrays, defaults: TalkerDefaults, *, end: bool) -> TalkerStart:
    """``end``: the request is also the last of its sequence. Raises InvalidRequestError."""
    content = read_json(inputs, "REQUEST", _KEYS)
    speaker = content.get("speaker", defaults.speaker)
    if not isinstance(speaker, str):
        raise InvalidRequestError("speaker", f"must be the name of a voice, got {speaker!r}")
    if "PROMPT_TOKEN_IDS" not in inputs:
        raise InvalidRequestError("PROMPT_TOKEN_IDS", "is missing; the request that opens a session needs the prompt")
    has_rows = [name in inputs for name in ("PROMPT_POSITIONS", "ROWS", "ROWS_DTYPE")]
    if any(has_rows) and not all(has_rows):
        raise InvalidRequestError("ROWS", "PROMPT_POSITIONS, ROWS and ROWS_DTYPE come together or not at all")
    plan = _plan(content, defaults.plan)
    return TalkerStart(
        prompt_token_ids=read_ids(inputs, "PROMPT_TOKEN_IDS"),
        speaker=speaker,
        sampling=from_mapping(
            TalkerSampling, read_object(content, "sampling"), where="sampling.", base=defaults.sampling
        ),
        chunk_frames=plan.frames,
        chunk_policy=plan.policy,
        prompt_rows=read_rows(inputs) if all(has_rows) else None,
        token_ids=read_ids(inputs, "TOKEN_IDS"),
        text_finished=end or read_flag(inputs, "TEXT_FINISHED"),
    )


def read_append(inputs: Arrays, *, end: bool) -> TalkerAppend:
    """A request after START."""
    cancel = read_flag(inputs, "CANCEL")
    return TalkerAppend(read_ids(inputs, "TOKEN_IDS"), end or read_flag(inputs, "TEXT_FINISHED"), cancel)


def codes_tensors(events: Sequence[CodesEvent]) -> list[list[Any]]:
    """One response per event: a chunk is complete when it leaves the engine."""
    return [[array_tensor("CODES", e.codes), constant_string("FINISH_REASON", e.finish_reason or "")] for e in events]


def read_codes(outputs: Arrays) -> CodesEvent:
    """One response of a session."""
    reason = cast(FinishReason, read_string(outputs, "FINISH_REASON"))
    return CodesEvent(outputs["CODES"], reason or None)


def _plan(content: Mapping[str, Any], default: ChunkPlan) -> ChunkPlan:
    frames = content.get("chunk_frames", list(default.frames))
    if not isinstance(frames, list) or not all(type(size) is int for size in frames):
        raise InvalidRequestError("chunk_frames", f"must be a list of integers, got {frames!r}")
    return ChunkPlan(tuple(frames), content.get("chunk_policy", default.policy))
