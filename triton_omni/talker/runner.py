"""What the engine asks of the network, and its plain answer: one PyTorch operation after the other.

A decode step is a function of (slot indices, text ids) and of the state in Slots: the sum of the last frame's code
embeddings plus the next text row goes through the backbone; from its hidden state the layer-0 code is sampled, and from
both the code predictor makes the residual codes of the same frame. The first step of a session finds codec BOS in the
place of a last frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triton_omni.pipeline.stages import Int32
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.model import Talker
from triton_omni.talker.prefill import Prefill, prefill_rows
from triton_omni.talker.sampler import sample_layer0, sample_residual
from triton_omni.talker.shape import TalkerShape
from triton_omni.talker.slots import Slots

# Batches are filled up to multiples of this. On CPU, where the rounding of a matrix product changes with its number of
# rows, they are also computed in pieces of it, so that a row gets the same bits whoever its neighbours are.
BATCH_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """An opened session's prompt. ``rows`` on the device: what its runner computes them from."""

    slot: int
    prefill: Prefill
    rows: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``first`` up to ``last`` of a prompt."""

    prompt: Prompt
    first: int
    last: int


class PendingFrames(Protocol):
    """A step's codes on their way to the host."""

    def read(self) -> Int32:
        """Codes int32 [B, groups]; waits for them."""


class Runner(Protocol):
    """Enqueues work on the device in the order of the calls. ``runs_ahead``: the calls return before it is done."""

    runs_ahead: bool

    @property
    def shape(self) -> TalkerShape: ...

    def open(self, slot: int, prefill: Prefill, sampling: TalkerSampling, seed: int) -> Prompt:
        """Give ``slot`` to a new session. What was enqueued for its last one still runs before."""

    def prefill(self, pieces: Sequence[Piece]) -> None:
        """Compute the next pieces of prompts, at most ``prefill_chunk`` rows together."""

    def decode(self, slots: Sequence[int], text_ids: Sequence[int], limit: int) -> PendingFrames:
        """The next frame of each of ``slots``, given its next text id; ``limit``: the longest slot's number of rows
        after this step.
        """


class TensorFrames:
    """PendingFrames in a tensor on the device [B, groups]."""

    def __init__(self, codes: Tensor) -> None:
        self._codes, self._arrived = codes.int(), None
        if codes.is_cuda:
            host = torch.empty(codes.shape, dtype=torch.int32, pin_memory=True)
            self._codes = host.copy_(self._codes, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(codes.device))

    def read(self) -> Int32:
        if self._arrived is not None:
            self._arrived.synchronize()
        codes: Int32 = self._codes.numpy()
        return codes


class TalkerRunner:
    """The plain Runner: a loaded Talker and the Slots it works on. Runs on every device; the kernels' reference."""

    def __init__(self, talker: Talker, slots: Slots) -> None:
        self.talker, self.slots = talker, slots
        self.runs_ahead = slots.device.type == "cuda"

    @property
    def shape(self) -> TalkerShape:
        return self.talker.shape

    @torch.inference_mode()
    def open(self, slot: int, prefill: Prefill, sampling: TalkerSampling, seed: int) -> Prompt:
        self.slots.open(slot, sampling, seed, position=prefill.next_position)
        # Stale keys are masked, but a masked NaN is still a NaN once multiplied by its weight 0.
        self.slots.kv[:, slot] = 0
        return Prompt(slot, prefill, prefill_rows(prefill, self.talker))

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._prefill(piece)

    def _prefill(self, piece: Piece) -> None:
        state, slot = self.slots, piece.prompt.slot
        rows = piece.prompt.rows[piece.first : piece.last]
        cache = state.cache(torch.tensor([slot], device=state.device), len(rows), limit=piece.last)
        positions = np.ascontiguousarray(piece.prompt.prefill.positions[:, piece.first : piece.last])
        self.talker.model(rows[None], torch.from_numpy(positions).to(state.device)[:, None], cache)
        state.length[slot] = piece.last

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], text_ids: Sequence[int], limit: int) -> PendingFrames:
        filled = -len(slots) % BATCH_ROWS
        given = torch.tensor([[*slots, *[self.slots.spare] * filled], [*text_ids, *[0] * filled]])
        inputs = given.to(self.slots.device, non_blocking=True)
        self.slots.length[self.slots.spare] = 0
        greedy = all(self.slots.greedy[slot] for slot in slots)
        piece_rows = BATCH_ROWS if inputs.device.type == "cpu" else inputs.shape[1]
        pieces = [self.step(piece[0], piece[1], limit, greedy) for piece in torch.split(inputs, piece_rows, dim=1)]
        return TensorFrames(torch.cat(pieces)[: len(slots)])

    def step(self, slots: Tensor, text_ids: Tensor, limit: int, greedy: bool) -> Tensor:
        """Codes int64 [B, groups] of one step of rows ``slots``, ``text_ids`` [B]. Reads no value on the host."""
        state, talker = self.slots, self.talker
        x = talker.embed_codes(state.codes[slots]) + F.embedding(text_ids, talker.text_table)
        cache = state.cache(slots, tokens=1, limit=limit)
        hidden = talker.model(x[:, None], state.position[slots][:, None], cache)[:, 0]
        state.length[slots] += 1
        state.position[slots] += 1
        rows = state.sampling(slots, all_greedy=greedy)
        first = sample_layer0(talker.codec_head(hidden), rows, talker.shape.codec.eos)
        residual = talker.code_predictor(
            hidden,
            talker.model.codec_embedding(first),
            lambda logits, group: sample_residual(logits, rows, group),
        )
        codes = torch.cat((first[:, None], residual), dim=1)  # [B, groups]
        state.keep(slots, codes)
        return codes
