"""The mixture-of-experts block for few rows: router, experts read once each, contributions summed in slot order.

The shared expert is cut into pseudo-experts of the routed experts' width that every row visits, weighted by its gate,
so that one pair of kernels serves both and nothing else runs in between.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from triton_omni.talker.kernels.linear import Residual, Tile, inverse_rms, norm_linear
from triton_omni.talker.kernels.overlap import let_next_start, wait_for_previous


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Assignments (numbers of row x slot) by expert. ``order`` int32 [assignments]; ``starts`` int32 [experts]: where
    in it those of an expert begin.
    """

    order: torch.Tensor
    starts: torch.Tensor


@triton.jit
def _choose(
    logits, squares, scales, ids, weights, eps,
    H: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    e = tl.arange(0, EXPERTS_PAD)
    let_next_start(PDL)
    wait_for_previous(PDL)
    one = row + tl.arange(0, 1)
    tl.store(scales + one, inverse_rms(squares, one, one >= 0, eps, H, PARTS))
    logit = tl.load(logits + row * COLUMNS + e, mask=e < EXPERTS, other=float("-inf"))
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    chosen = tl.zeros((triton.next_power_of_2(TOP_K),), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(p, 0)
        chosen = tl.where(slot == i, tl.max(p, 0), chosen)
        tl.store(ids + row * (TOP_K + SHARED) + i, best.to(tl.int32))
        p = tl.where(e == best, -1.0, p)
    if NORMALISE:
        chosen = chosen / tl.sum(chosen, 0)
    tl.store(weights + row * (TOP_K + SHARED) + slot, chosen, mask=slot < TOP_K)
    if SHARED > 0:
        gate = tl.load(logits + row * COLUMNS + EXPERTS)
        for i in tl.static_range(SHARED):
            tl.store(ids + row * (TOP_K + SHARED) + TOP_K + i, EXPERTS + i)
            tl.store(weights + row * (TOP_K + SHARED) + TOP_K + i, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit(do_not_specialize=["assignments"])
def _group(ids, order, starts, assignments, PAD: tl.constexpr, PDL: tl.constexpr):
    """One expert's assignments (row x slot), in order, behind those of the experts before it."""
    expert = tl.program_id(0)
    a = tl.arange(0, PAD)
    let_next_start(PDL)
    wait_for_previous(PDL)
    owner = tl.load(ids + a, mask=a < assignments, other=2147483647)
    mine = owner == expert
    start = tl.sum((owner < expert).to(tl.int32), 0)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + start + rank, a, mask=mine)
    tl.store(starts + expert, start)


@triton.jit(do_not_specialize=["assignments"])
def _experts(
    x, scales, ids, order, starts, w, out, assignments,
    K: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, GATED: tl.constexpr,
    BY_ASSIGNMENT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One expert's tile of outputs for every assignment of that expert, BLOCK_M at a time."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    if BY_ASSIGNMENT:  # few rows: a program per assignment; the first of an expert works for all of its kind
        expert = tl.load(ids + tl.load(order + tl.program_id(0)))
        start = tl.load(starts + expert)
        leads = start == tl.program_id(0)
    else:
        expert = EXPERTS - 1 - tl.program_id(0)  # the shared expert has most rows: it starts first
        start = tl.load(starts + expert)
        leads = True
    end = tl.load(starts + expert + 1, mask=expert + 1 < EXPERTS, other=assignments)
    if leads and end > start:
        m = tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        n_ok = n < N
        rows_of_w: tl.constexpr = 2 * N if GATED else N
        base = w + expert.to(tl.int64) * rows_of_w * K
        for m0 in range(start, end, BLOCK_M):
            m_ok = (m0 + m) < end
            which = tl.load(order + m0 + m, mask=m_ok, other=0)  # [BLOCK_M] assignment numbers
            source = which // SLOTS if GATED else which
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k0 in range(0, K, BLOCK_K):
                k_ok = (k0 + k) < K
                x_at = x + source.to(tl.int64)[:, None] * K + (k0 + k)[None, :]
                xt = tl.load(x_at, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
                w_ok = n_ok[:, None] & k_ok[None, :]
                w_at = base + n[:, None] * K + (k0 + k)[None, :]
                acc = tl.dot(xt, tl.trans(tl.load(w_at, mask=w_ok, other=0.0)), acc, input_precision=PRECISION)
                if GATED:
                    wu = tl.load(w_at + N * K, mask=w_ok, other=0.0)
                    up = tl.dot(xt, tl.trans(wu), up, input_precision=PRECISION)
            if GATED:
                scale = tl.load(scales + source, mask=m_ok, other=0.0)[:, None]
                acc = acc * scale
                acc = acc / (1.0 + tl.exp(-acc)) * (up * scale)
            at = out + which.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(at, acc.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@triton.jit
def _combine(
    parts, weights, residual, gain, out, scaled, squares,
    H: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    let_next_start(PDL)
    wait_for_previous(PDL)
    ok = h < H
    total = tl.zeros((BLOCK_H,), tl.float32)
    for i in tl.static_range(SLOTS):
        weight = tl.load(weights + row * SLOTS + i)
        total += weight * tl.load(parts + (row * SLOTS + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    total += tl.load(residual + row * H + h, mask=ok, other=0.0)
    tl.store(out + row * H + h, total, mask=ok)
    next_gain = tl.load(gain + h, mask=ok, other=0.0).to(tl.float32)
    tl.store(scaled + row * H + h, (total * next_gain).to(scaled.dtype.element_ty), mask=ok)
    tl.store(squares + row * TILES + tile, tl.sum(tl.where(ok, total * total, 0.0), 0))


def route(
    x: Residual,
    eps: float,
    router: torch.Tensor,
    shared: int,
    top_k: int,
    normalise: bool,
    logits: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tile: Tile,
    pdl: bool = False,
) -> None:
    """RMSNorm, router softmax (float32) and the choice of experts.

    router [experts + 1, H], last row the shared expert's gate; logits float32 [rows, experts + 1]: scratch. Writes
    scales float32 [rows] (what ``x.scaled`` lacks to be normed), ids int32 [rows, top_k + shared] (pseudo-experts of
    the shared expert last, numbered from ``experts``) and weights float32 of the same shape.
    """
    rows, columns = logits.shape
    norm_linear(x, eps, router, logits, tile, pdl)
    _choose[(rows,)](
        logits, x.squares, scales, ids, weights, eps,
        H=router.shape[1], EXPERTS=columns - 1, EXPERTS_PAD=triton.next_power_of_2(columns - 1), TOP_K=top_k,
        SHARED=shared, COLUMNS=columns, PARTS=x.squares.shape[1], NORMALISE=normalise,
        PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def group(ids: torch.Tensor, groups: Groups, pdl: bool = False) -> None:
    """Collect the assignments of each expert: ids int32 [rows, slots]."""
    assignments = ids.numel()
    _group[(groups.starts.shape[0],)](
        ids, groups.order, groups.starts, assignments,
        PAD=triton.next_power_of_2(assignments), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def expert_products(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    groups: Groups,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    gated: bool,
    tile: Tile,
    pdl: bool = False,
) -> None:
    """``gated``: x [rows, K] times scales [rows], w [experts, 2 N, K] (gate above up) -> out [rows * slots, N]:
    silu(gate) * up.
    Otherwise: x [rows * slots, K], w [experts, N, K] -> out [rows * slots, N]. ids int32 [rows, slots], and the same as
    ``group`` left it.
    """
    rows, slots = ids.shape
    experts, k = w.shape[0], w.shape[2]
    n = w.shape[1] // 2 if gated else w.shape[1]
    assignments = rows * slots
    by_assignment = assignments < experts
    _experts[(assignments if by_assignment else experts, triton.cdiv(n, tile.block_n))](
        x, scales, ids, groups.order, groups.starts, w, out, assignments,
        K=k, N=n, SLOTS=slots, EXPERTS=experts, GATED=gated, BY_ASSIGNMENT=by_assignment,
        PRECISION="ieee" if w.dtype == torch.float32 else "tf32",
        PDL=pdl, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    out: Residual,
    pdl: bool = False,
) -> None:
    """``out = residual + sum over slots of weights * parts``, slots in order, in front of a norm with ``gain``;
    parts [rows * slots, H].
    """
    rows, slots = weights.shape
    h, tiles = residual.shape[1], out.squares.shape[1]
    _combine[(rows, tiles)](
        parts, weights, residual, gain, out.hidden, out.scaled, out.squares,
        H=h, SLOTS=slots, TILES=tiles, BLOCK_H=triton.next_power_of_2(triton.cdiv(h, tiles)),
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
