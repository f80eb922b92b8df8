"""Per-session state of the talker, as tensors indexed by slot: what one decode step leaves for the next."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_omni.sampling import TalkerSampling
from triton_omni.talker.sampler import RowSampling
from triton_omni.talker.shape import TalkerShape

# Keys are read in multiples of this, so that a row's sums over them do not depend on how long its batch mates are.
CONTEXT_STEP = 64


class Slots:
    """``count`` slots for sessions and one more, ``spare``, for rows that only fill a batch up.

    ``kv`` [layers, slots, 2, kv_heads, max_context, head_dim]; ``length`` [slots] rows in it; ``position`` [slots] the
    next rotary position; ``codes`` [slots, groups] of the last frame, negative where there is none; the rest is
    RowSampling's. ``greedy``: which slots have temperature 0, known on the host.
    """

    def __init__(self, shape: TalkerShape, count: int, max_context: int, device: torch.device, dtype: torch.dtype):
        decoder, size = shape.backbone, count + 1
        self.count, self.spare, self.max_context, self.device = count, count, max_context, device
        self.kv = torch.zeros(
            (decoder.layers, size, 2, decoder.kv_heads, max_context, decoder.head_dim), dtype=dtype, device=device
        )
        # One tensor a kind, so that a slot opens with a few copies.
        self._integers = torch.zeros(6, size, dtype=torch.long, device=device)
        self._floats = torch.zeros(3, size, device=device)
        self.length, self.position, self.frame, self.top_k, self.min_frames, self.seed = self._integers
        self.temperature, self.top_p, self.repetition_penalty = self._floats
        self._floats[1:] = 1
        self.codes = torch.zeros(size, shape.groups, dtype=torch.long, device=device)
        self.seen = torch.zeros(size, decoder.vocab, dtype=torch.bool, device=device)
        self.greedy = [True] * size
        self._first_codes = torch.full((shape.groups,), -1, device=device)
        self._first_codes[0] = shape.codec.bos
        self._true = torch.ones((), dtype=torch.bool, device=device)  # a graph cannot take it from the host

    def open(self, slot: int, sampling: TalkerSampling, seed: int, *, length: int = 0, position: int = 0) -> None:
        """Give ``slot`` to a new session that begins with codec BOS behind ``length`` rows, at rotary ``position``.

        Nothing of the last session stays but its keys, which lie beyond the length until they are overwritten.
        """
        integers = torch.tensor([length, position, 0, sampling.top_k, sampling.min_frames, seed])
        floats = torch.tensor([sampling.temperature, sampling.top_p, sampling.repetition_penalty])
        self._integers[:, slot] = integers.to(self.device, non_blocking=True)
        self._floats[:, slot] = floats.to(self.device, non_blocking=True)
        self.codes[slot] = self._first_codes
        self.seen[slot] = False
        self.greedy[slot] = sampling.temperature == 0

    def sampling(self, slots: Tensor, *, all_greedy: bool = False) -> RowSampling:
        """Parameters and state of the rows ``slots`` [B]."""
        return RowSampling(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            repetition_penalty=self.repetition_penalty[slots],
            min_frames=self.min_frames[slots],
            seed=self.seed[slots],
            frame=self.frame[slots],
            seen=self.seen[slots],
            all_greedy=all_greedy,
        )

    def every(self) -> RowSampling:
        """The state of all slots itself, not a copy: for kernels that take their rows by slot."""
        return RowSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            min_frames=self.min_frames,
            seed=self.seed,
            frame=self.frame,
            seen=self.seen,
        )

    def keep(self, slots: Tensor, codes: Tensor) -> None:
        """Remember ``codes`` [B, groups], the frame just made."""
        self.codes[slots] = codes
        self.seen.index_put_((slots, codes[:, 0]), self._true)
        self.frame[slots] += 1

    def cache(self, slots: Tensor, tokens: int, limit: int) -> SlotCache:
        """A view of the KV cache for ``tokens`` new rows of each of ``slots`` [B]; ``limit``: the longest row's length
        with them, known on the host.
        """
        return SlotCache(self, slots, tokens, limit)


class SlotCache:
    """The backbone's cache during one forward pass: writes the new keys behind each slot's own."""

    def __init__(self, state: Slots, slots: Tensor, tokens: int, limit: int) -> None:
        self.kv, self.slots = state.kv, slots
        self.limit = min(-(-limit // CONTEXT_STEP) * CONTEXT_STEP, state.max_context)
        self.rows = state.length[slots][:, None] + torch.arange(tokens, device=state.device)  # [B, T]
        keys = torch.arange(self.limit, device=state.device)
        self.visible = (keys <= self.rows[..., None])[:, None]  # [B, 1, T, limit]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        cache = self.kv[layer]
        cache[self.slots[:, None], 0, :, self.rows] = keys
        cache[self.slots[:, None], 1, :, self.rows] = values
        past = cache[self.slots, :, :, : self.limit]  # [B, 2, kv_heads, limit, head_dim]
        return past[:, 0], past[:, 1], self.visible
