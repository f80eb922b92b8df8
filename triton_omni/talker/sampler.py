"""Picking codes, row by row: filters as transformers' logits processors, draws from a counter-based generator.

A draw depends on (seed, frame, code group, code) and nothing else, so a session gets the same codes in any batch, slot
or order of arrival; and everything is a tensor operation without a read on the host, so it can be captured.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from triton_omni.talker.shape import SUPPRESSED_CODES

# transformers' generate samples residual codes with these, whatever the talker's own parameters are.
PREDICTOR_TOP_K = 50
PREDICTOR_TOP_P = 0.8

_NEVER = float("-inf")
# SplitMix64 (Steele, Lea and Flood, 2014): increments of the golden ratio, finished by two multiplications.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLY_2 = 0x94D049BB133111EB - 2**64


@dataclasses.dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters and state of B rows. All [B] except ``seen`` bool [B, vocabulary]: layer-0 codes so far.

    ``temperature`` float32, 0 is greedy; ``top_k`` int64, 0 is no limit; ``top_p``, ``repetition_penalty`` float32;
    ``min_frames`` int64: EOS is not allowed before; ``seed`` int64; ``frame`` int64: number of the frame to draw.
    ``all_greedy``: the host knows that every temperature is 0, so that nothing needs to be drawn.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition_penalty: Tensor
    min_frames: Tensor
    seed: Tensor
    frame: Tensor
    seen: Tensor
    all_greedy: bool = False


def sample_layer0(logits: Tensor, rows: RowSampling, eos: int) -> Tensor:
    """Layer-0 codes int64 [B] from the codec head's ``logits`` [B, vocabulary].

    float32, repetition penalty (also when greedy), suppression of control codes, temperature, top-k, top-p.
    """
    scores = allowed_scores(logits, rows, eos)
    greedy = scores.argmax(dim=-1)
    if rows.all_greedy:
        return greedy
    sampled_at = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    kept = keep_top(scores / sampled_at[:, None], rows.top_k, rows.top_p)
    codes = torch.arange(logits.shape[-1], device=logits.device)
    drawn = (kept + gumbel(rows.seed, rows.frame, 0, codes.expand_as(kept))).argmax(dim=-1)
    return torch.where(rows.temperature > 0, drawn, greedy)


def sample_residual(logits: Tensor, rows: RowSampling, group: int) -> Tensor:
    """Codes int64 [B] of a residual ``group`` from the predictor's ``logits`` [B, codebook]: greedy where the row's
    temperature is 0, else drawn from ``residual_scores``.
    """
    greedy = logits.argmax(dim=-1)
    if rows.all_greedy:
        return greedy
    scores, codes = residual_scores(logits)
    drawn = (scores + gumbel(rows.seed, rows.frame, group, codes)).argmax(dim=-1, keepdim=True)
    return torch.where(rows.temperature > 0, codes.gather(-1, drawn)[:, 0], greedy)


def residual_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best codes and their float32 scores, [B, top-k] each, descending; -inf outside the nucleus."""
    scores, codes = logits.float().topk(min(PREDICTOR_TOP_K, logits.shape[-1]), dim=-1)
    outside = _outside_nucleus(scores.flip(-1), PREDICTOR_TOP_P).flip(-1)
    return scores.masked_fill(outside, _NEVER), codes


def allowed_scores(logits: Tensor, rows: RowSampling, eos: int) -> Tensor:
    """float32 scores after repetition penalty and suppression."""
    scores, vocabulary = logits.float(), logits.shape[-1]
    penalty = rows.repetition_penalty[:, None]
    penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
    scores = torch.where(rows.seen, penalised, scores)
    codes = torch.arange(vocabulary, device=logits.device)
    banned = (codes >= vocabulary - SUPPRESSED_CODES) & (codes != eos)
    early = (rows.frame < rows.min_frames)[:, None] & (codes == eos)
    return scores.masked_fill(banned | early, _NEVER)


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``scores`` [B, V] with -inf outside each row's ``top_k`` best and outside its nucleus of mass ``top_p`` (the code
    that crosses the mass stays).
    """
    size = scores.shape[-1]
    limit = torch.where(top_k > 0, top_k, size).clamp(max=size)
    ascending, order = scores.sort(dim=-1, stable=True)
    kth = ascending.gather(-1, (size - limit)[:, None])
    ascending = ascending.masked_fill(ascending < kth, _NEVER)
    outside = _outside_nucleus(ascending, top_p[:, None]) & (top_p < 1)[:, None]
    return torch.empty_like(scores).scatter(-1, order, ascending.masked_fill(outside, _NEVER))


def _outside_nucleus(ascending: Tensor, top_p: Tensor | float) -> Tensor:
    """Which of the ``ascending`` scores [B, N] lie in the tail of mass 1 - top_p; never the last one."""
    outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    outside[..., -1] = False
    return outside


def gumbel(seed: Tensor, frame: Tensor, group: int, codes: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [B, N] for ``codes`` int64 [B, N] of one ``group`` (< 2^16) in each row's ``frame``
    [B] under its ``seed`` [B]. argmax(log-probabilities + noise) is a draw from the distribution.
    """
    key = _mix(_mix(seed) + (frame * 2**16 + group + 1) * _GOLDEN)
    bits = _mix(key[:, None] + (codes + 1) * _GOLDEN)
    uniform = (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23  # exact in float32, never 0 or 1
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap and whose shifts are made logical by the masks."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MULTIPLY_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MULTIPLY_2
    return x ^ ((x >> 31) & (2**33 - 1))
