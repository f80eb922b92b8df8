"""The talker's tensor functions: prefill, first frame, decode step. None of them reads a value on the host.

A decode step is a function of (slot indices, text ids) and of the state in Slots: the sum of the last frame's code
embeddings plus the next text row goes through the backbone; from its hidden state the layer-0 code is sampled, and from
both the code predictor makes the residual codes of the same frame.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triton_omni.talker.model import Talker
from triton_omni.talker.prefill import Int64, Prefill, prefill_rows
from triton_omni.talker.sampler import sample_layer0, sample_residual
from triton_omni.talker.slots import Slots

# Batches are filled up to multiples of this. On CPU, where the rounding of a matrix product changes with its number of
# rows, they are also computed in pieces of it, so that a row gets the same bits whoever its neighbours are.
BATCH_ROWS = 8


class TalkerRunner:
    """A loaded Talker and the Slots it works on."""

    def __init__(self, talker: Talker, slots: Slots) -> None:
        self.talker, self.slots = talker, slots

    @torch.inference_mode()
    def prompt_rows(self, prefill: Prefill, first_text_id: int) -> Tensor:
        """The prompt as rows [T, hidden] on the device."""
        return prefill_rows(prefill, first_text_id, self.talker)

    @torch.inference_mode()
    def prefill(self, slot: int, rows: Tensor, positions: Int64, start: int) -> Tensor:
        """Put ``rows`` [T, hidden] at rotary ``positions`` [3, T] behind the ``start`` rows that ``slot`` has.
        Returns the last row's hidden state [1, hidden].
        """
        state, tokens = self.slots, rows.shape[0]
        cache = state.cache(torch.tensor([slot], device=state.device), tokens, limit=start + tokens)
        at = torch.from_numpy(np.ascontiguousarray(positions)).to(state.device)
        hidden: Tensor = self.talker.model(rows[None], at[:, None], cache)  # [1, T, hidden]
        state.length[slot] = start + tokens
        state.position[slot] = int(positions.max()) + 1
        return hidden[:, -1]

    @torch.inference_mode()
    def first_frame(self, slot: int, hidden: Tensor) -> Tensor:
        """Codes [1, groups] of the frame that follows prefill's ``hidden`` [1, hidden]."""
        return self._speak(torch.tensor([slot], device=self.slots.device), hidden, self.slots.greedy[slot])

    @torch.inference_mode()
    def decode(self, slots: list[int], text_ids: list[int], limit: int) -> Tensor:
        """Codes int64 [B, groups] of the next frame of each of ``slots``, given its next text id; ``limit``: the
        longest slot's number of rows after this step.
        """
        filled = -len(slots) % BATCH_ROWS
        inputs = torch.tensor([slots + [self.slots.spare] * filled, text_ids + [0] * filled]).to(self.slots.device)
        self.slots.length[self.slots.spare] = 0
        greedy = all(self.slots.greedy[slot] for slot in slots)
        piece_rows = BATCH_ROWS if inputs.device.type == "cpu" else inputs.shape[1]
        pieces = [self._step(piece[0], piece[1], limit, greedy) for piece in torch.split(inputs, piece_rows, dim=1)]
        return torch.cat(pieces)[: len(slots)]

    def _step(self, slots: Tensor, text_ids: Tensor, limit: int, greedy: bool) -> Tensor:
        state, talker = self.slots, self.talker
        x = talker.embed_codes(state.codes[slots]) + F.embedding(text_ids, talker.text_table)
        cache = state.cache(slots, tokens=1, limit=limit)
        hidden = talker.model(x[:, None], state.position[slots][:, None], cache)[:, 0]
        state.length[slots] += 1
        state.position[slots] += 1
        return self._speak(slots, hidden, greedy)

    def _speak(self, slots: Tensor, hidden: Tensor, greedy: bool) -> Tensor:
        talker, rows = self.talker, self.slots.sampling(slots, all_greedy=greedy)
        first = sample_layer0(talker.codec_head(hidden), rows, talker.shape.codec.eos)
        residual = talker.code_predictor(
            hidden,
            talker.model.codec_embedding(first),
            lambda logits, group: sample_residual(logits, rows, group),
        )
        codes = torch.cat((first[:, None], residual), dim=1)  # [B, groups]
        self.slots.keep(slots, codes)
        return codes
