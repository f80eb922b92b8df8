"""Sampling of one code per row in one program: thresholds by bisection over the float's bits instead of a sort.

The same filters, order and random numbers as ``triton_omni.talker.sampler``, which is this file's reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_omni.talker.kernels.linear import Residual
from triton_omni.talker.kernels.overlap import let_next_start, wait_for_previous
from triton_omni.talker.sampler import PREDICTOR_TOP_K, PREDICTOR_TOP_P, RowSampling
from triton_omni.talker.shape import SUPPRESSED_CODES

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on int64."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLY_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLY_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _gumbel(seed, frame, group, code):
    key = _mix(_mix(seed) + (frame * 65536 + group + 1) * _GOLDEN)
    bits = _mix(key + (code.to(tl.int64) + 1) * _GOLDEN)
    uniform = (((bits >> 41) & 8388607).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _order(x):
    """float32 -> int32 that sorts alike."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keep_top(scores, top_k, top_p):
    """``scores`` with -inf outside the ``top_k`` best (ties stay) and outside the nucleus of mass ``top_p``.

    Both bounds are found bit by bit, two bits a turn: a turn's four candidates share one pass.
    """
    order = _order(scores)[None, :]
    step = tl.arange(0, 4)
    kth = tl.full((), -2147483648, tl.int32)
    for i in range(16):
        at = kth + (step << (30 - 2 * i))
        held = tl.sum((order >= at[:, None]).to(tl.int32), 1)
        kth += tl.sum(((held >= top_k) & (step > 0)).to(tl.int32), 0) << (30 - 2 * i)
    scores = tl.where(_order(scores) >= kth, scores, float("-inf"))
    if top_p < 1.0:
        p = tl.exp(scores - tl.max(scores, 0))
        mass = tl.sum(p, 0) * top_p
        # the greatest bound at which what is strictly better still holds the mass: nothing at it or below is kept
        bound = tl.full((), -2147483648, tl.int32)
        for i in range(16):
            at = bound + (step << (30 - 2 * i))
            held_mass = tl.sum(tl.where(order > at[:, None], p[None, :], 0.0), 1)
            bound += tl.sum(((held_mass >= mass) & (step > 0)).to(tl.int32), 0) << (30 - 2 * i)
        scores = tl.where(_order(scores) > bound, scores, float("-inf"))
    return scores


@triton.jit
def _finish_code(
    code,
    row,
    codes,
    group,
    table,
    gain,
    hidden,
    scaled,
    squares,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write the code, and its embedding as the next input of the predictor."""
    h = tl.arange(0, BLOCK_H)
    tl.store(codes + row * GROUPS + group, code)
    x = tl.load(table + code.to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(hidden + row * H + h, x, mask=h < H)
    next_gain = tl.load(gain + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(scaled + row * H + h, (x * next_gain).to(scaled.dtype.element_ty), mask=h < H)
    tl.store(squares + row, tl.sum(x * x, 0))


@triton.jit
def _sample_layer0(
    logits, slots, temperature, top_k, top_p, penalty, min_frames, seed, frame, seen, codes, table, gain, hidden,
    scaled, squares, eos,
    V: tl.constexpr, BANNED: tl.constexpr, BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    ok = v < V
    let_next_start(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    number = tl.load(frame + slot)
    scores = tl.load(logits + row * V + v, mask=ok, other=float("-inf"))
    factor = tl.load(penalty + slot)
    heard = tl.load(seen + slot * V + v, mask=ok, other=0) != 0
    scores = tl.where(heard, tl.where(scores < 0, scores * factor, scores / factor), scores)
    banned = (v >= V - BANNED) & (v != eos)
    banned = banned | ((v == eos) & (number < tl.load(min_frames + slot)))
    scores = tl.where(banned | (v >= V), float("-inf"), scores)
    heat = tl.load(temperature + slot)
    if heat > 0:
        limit = tl.load(top_k + slot)
        limit = tl.where(limit > 0, tl.minimum(limit, V), V)
        scores = _keep_top(scores / heat, limit, tl.load(top_p + slot))
        scores = scores + _gumbel(tl.load(seed + slot), number, 0, v)
    code = tl.argmax(scores, 0)
    tl.store(seen + slot * V + code, 1)
    _finish_code(code, row, codes, 0, table, gain, hidden, scaled, squares, GROUPS, H, BLOCK_H)


@triton.jit
def _sample_residual(
    logits, slots, temperature, seed, frame, codes, table, gain, hidden, scaled, squares, group,
    V: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    let_next_start(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    scores = tl.load(logits + row * V + v, mask=v < V, other=float("-inf"))
    if tl.load(temperature + slot) > 0:
        scores = _keep_top(scores, TOP_K, TOP_P)
        scores = scores + _gumbel(tl.load(seed + slot), tl.load(frame + slot), group, v)
    code = tl.argmax(scores, 0)
    _finish_code(code, row, codes, group, table, gain, hidden, scaled, squares, GROUPS, H, BLOCK_H)


def sample_layer0(
    logits: torch.Tensor,
    slots: torch.Tensor,
    state: RowSampling,
    eos: int,
    codes: torch.Tensor,
    table: torch.Tensor,
    gain: torch.Tensor,
    out: Residual,
    pdl: bool = False,
) -> None:
    """Layer-0 code of each row into ``codes[:, 0]``, into the slot's ``seen``, and its embedding into ``out``.

    logits float32 [rows, V]; ``state``'s tensors by slot; table [V, H]: the layer-0 embedding; gain [H]: of
    the norm that follows.
    """
    rows, v = logits.shape
    h = table.shape[1]
    _sample_layer0[(rows,)](
        logits, slots, state.temperature, state.top_k, state.top_p, state.repetition_penalty, state.min_frames,
        state.seed, state.frame, state.seen.view(torch.uint8), codes, table, gain,
        out.hidden, out.scaled, out.squares, eos,
        V=v, BANNED=SUPPRESSED_CODES, BLOCK_V=triton.next_power_of_2(v),
        GROUPS=codes.shape[1], H=h, BLOCK_H=triton.next_power_of_2(h), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


def sample_residual(
    logits: torch.Tensor,
    slots: torch.Tensor,
    state: RowSampling,
    group: int,
    codes: torch.Tensor,
    table: torch.Tensor,
    gain: torch.Tensor,
    out: Residual,
    pdl: bool = False,
) -> None:
    """Code of a residual ``group`` of each row into ``codes[:, group]`` and its embedding into ``out``.

    logits float32 [rows, codebook]; table [codebook, H]: that group's embedding; gain [H]: of the norm that follows.
    """
    rows, v = logits.shape
    h = table.shape[1]
    _sample_residual[(rows,)](
        logits, slots, state.temperature, state.seed, state.frame, codes, table, gain,
        out.hidden, out.scaled, out.squares, group,
        V=v, TOP_K=min(PREDICTOR_TOP_K, v), TOP_P=PREDICTOR_TOP_P, BLOCK_V=triton.next_power_of_2(v),
        GROUPS=codes.shape[1], H=h, BLOCK_H=triton.next_power_of_2(h), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
