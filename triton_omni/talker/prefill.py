"""What the talker reads before it speaks: the user's turns and the head of the assistant's, as rows and positions.

Reference: transformers' Qwen3OmniMoeForConditionalGeneration.generate and _get_talker_assistant_parts. User segments
are kept whole (text rows through the projected text table, media rows through ``hidden_projection``); of the
assistant's turns only the last one counts. It contributes eight rows, each the sum of a text side and a codec side:

    text side     <|im_start|>  assistant  \\n  pad      pad        pad        pad      tts_bos
    codec side    -             -          -   nothink  think_bos  think_eos  speaker  pad

The row after them, first text token and codec BOS, makes the first frame: it is the first decode step.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import PromptRows, TalkerStart
from triton_omni.talker.model import Talker
from triton_omni.talker.shape import TalkerShape

ASSISTANT_ROWS = 8
NONE = -1
HEADER_TOKENS = 3  # <|im_start|>, role, newline
_ROW_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """T rows. ``text_ids``, ``codec_ids`` int64 [T]: the two sides, negative where there is none; ``positions`` int64
    [3, T]; ``media_at`` int64 [M]: rows whose text side is a row of ``media`` [M, thinker hidden]. ``answer_ids``: text
    that the prompt has already put into the assistant's mouth, to be spoken first.
    """

    text_ids: Int64
    codec_ids: Int64
    positions: Int64
    media_at: Int64
    media: Tensor
    answer_ids: list[int]

    @property
    def rows(self) -> int:
        return self.positions.shape[1]

    @property
    def next_position(self) -> int:
        """Rotary position of the first decode step."""
        return int(self.positions.max()) + 1


def plan_prefill(start: TalkerStart, shape: TalkerShape) -> Prefill | None:
    """The rows that ``start`` asks for; None when there is no user message, so nothing to answer aloud.

    Raises: InvalidRequestError naming prompt_token_ids, prompt_rows or speaker.
    """
    speaker = speaker_code(start.speaker, shape)
    ids = np.asarray(start.prompt_token_ids, np.int64)
    check_text_ids("prompt_token_ids", ids, shape)
    segments = _segments(ids, shape)
    if not segments or ids[segments[-1].start + 1 : segments[-1].start + 2] != shape.text.assistant:
        raise InvalidRequestError("prompt_token_ids", "must end with the head of an assistant turn")
    users = [s for s in segments if s.stop - s.start > 1 and ids[s.start + 1] == shape.text.user]
    if not users:
        return None
    user_at = np.concatenate([np.arange(s.start, s.stop) for s in users])
    media_at, media = _media(ids, user_at, start.prompt_rows, shape)
    positions, following = _positions(users, start.prompt_rows)
    assistant = ids[segments[-1]]
    all_positions = np.concatenate([*positions, _line(following, ASSISTANT_ROWS)], axis=1)
    if not 0 <= all_positions.min() <= all_positions.max() < shape.max_positions:
        raise InvalidRequestError(
            "prompt_rows",
            f"positions must stay within [0, {shape.max_positions}) from one kept segment to the next, got "
            f"{all_positions.min()} to {all_positions.max()}",
        )
    text, codec = shape.text, shape.codec
    text_ids = np.concatenate([ids[user_at], assistant[:HEADER_TOKENS], [text.tts_pad] * 4, [text.tts_bos]])
    text_ids[media_at] = NONE
    spoken = [codec.nothink, codec.think_bos, codec.think_eos, speaker, codec.pad]
    return Prefill(
        text_ids=text_ids,
        codec_ids=np.array([NONE] * (len(text_ids) - len(spoken)) + spoken),
        positions=all_positions,
        media_at=media_at,
        media=media,
        answer_ids=assistant[HEADER_TOKENS:].tolist(),
    )


def prefill_rows(prefill: Prefill, talker: Talker) -> Tensor:
    """The rows themselves, [T, hidden]."""
    device = talker.text_table.device
    text_ids, codec_ids = (torch.from_numpy(ids).to(device) for ids in (prefill.text_ids, prefill.codec_ids))
    rows = talker.text_table[text_ids.clamp(min=0)]
    if len(prefill.media_at):
        rows[torch.from_numpy(prefill.media_at).to(device)] = media_rows(prefill, talker)
    codes = talker.model.codec_embedding(codec_ids.clamp(min=0))
    total: Tensor = rows + codes.masked_fill((codec_ids < 0)[:, None], 0)
    return total


def media_rows(prefill: Prefill, talker: Talker) -> Tensor:
    """The text side of the rows ``media_at``, [M, hidden]."""
    table, media = talker.text_table, prefill.media
    if table.device.type == "cuda":
        media = media.pin_memory()  # so that the copy does not wait for the steps in front of it
    projected: Tensor = talker.hidden_projection(media.to(table.device, non_blocking=True).to(table.dtype))
    return projected


def speaker_code(speaker: str, shape: TalkerShape) -> int:
    """The codec id of a voice. Raises InvalidRequestError listing the voices."""
    code = shape.speakers.get(speaker.lower())
    if code is None:
        raise InvalidRequestError("speaker", f"{speaker!r} is not a voice here; voices: {', '.join(shape.speakers)}")
    return code


def check_text_ids(field: str, ids: npt.NDArray[np.integer[Any]], shape: TalkerShape) -> None:
    """Raises InvalidRequestError unless ``ids`` is one-dimensional and within the thinker's vocabulary."""
    if ids.ndim != 1:
        raise InvalidRequestError(field, f"must be one-dimensional, got shape {list(ids.shape)}")
    if len(ids) and not 0 <= ids.min() <= ids.max() < shape.thinker_vocab:
        wrong = ids[(ids < 0) | (ids >= shape.thinker_vocab)][0]
        raise InvalidRequestError(field, f"must lie in [0, {shape.thinker_vocab}), got {wrong}")


def _segments(ids: Int64, shape: TalkerShape) -> list[slice]:
    starts = [*np.flatnonzero(ids == shape.text.im_start).tolist(), len(ids)]
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


def _media(ids: Int64, user_at: Int64, given: PromptRows | None, shape: TalkerShape) -> tuple[Int64, Tensor]:
    """Where media rows stand among the user rows, and these rows."""
    is_media = np.isin(ids, shape.text.media)
    media_at = np.flatnonzero(is_media[user_at])
    if given is None:
        if len(media_at):
            raise InvalidRequestError("prompt_rows", f"must be given: the prompt has {len(media_at)} media positions")
        return media_at, torch.empty(0, shape.thinker_hidden)
    if given.dtype not in _ROW_DTYPES:
        raise InvalidRequestError("prompt_rows", f"dtype must be one of {', '.join(_ROW_DTYPES)}, got {given.dtype!r}")
    dtype = _ROW_DTYPES[given.dtype]
    expected = int(is_media.sum()) * shape.thinker_hidden * dtype.itemsize
    if given.rows.size != expected or given.positions.shape != (3, len(ids)):
        raise InvalidRequestError(
            "prompt_rows",
            f"must be {expected} bytes of {given.dtype} and positions [3, {len(ids)}] for this prompt, got "
            f"{given.rows.size} bytes and positions {list(given.positions.shape)}",
        )
    if not len(media_at):
        return media_at, torch.empty(0, shape.thinker_hidden)
    rows = torch.frombuffer(bytearray(given.rows.tobytes()), dtype=dtype).view(-1, shape.thinker_hidden)
    order = np.cumsum(is_media) - 1  # prompt position -> number of its media row
    return media_at, rows[torch.from_numpy(order[user_at[media_at]])]


def _positions(users: list[slice], given: PromptRows | None) -> tuple[list[Int64], int]:
    """Positions of each user segment, [3, length], and the first one after them.

    The thinker's own, moved so that each kept segment follows the last kept one; equal to what get_rope_index gives for
    the kept segments alone.
    """
    following, parts = 0, []
    for segment in users:
        if given is None:
            part = _line(following, segment.stop - segment.start)
        else:
            own = given.positions[:, segment].astype(np.int64)
            part = own - own[:, 0].max() + following
        parts.append(part)
        following = int(part.max()) + 1
    return parts, following


def _line(first: int, length: int) -> Int64:
    return np.broadcast_to(np.arange(first, first + length), (3, length))
