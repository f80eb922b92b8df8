"""The row-wise ends of a talker step: embeddings in, final norm, bookkeeping of the slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_omni.talker.kernels.linear import Residual
from triton_omni.talker.kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def _embed_step(
    slots, text_ids, codes, offsets, codec_table, text_table, other_rows, gain, hidden, scaled, squares,
    H: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr, BLOCK_H: tl.constexpr, OTHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    ok = h < H
    let_next_start(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    text = tl.load(text_ids + row).to(tl.int64)
    if OTHER:
        heard = tl.load(text_table + tl.maximum(text, 0) * H + h, mask=ok & (text >= 0), other=0.0)
        heard += tl.load(other_rows + row * H + h, mask=ok & (text < 0), other=0.0)
    else:
        heard = tl.load(text_table + text * H + h, mask=ok, other=0.0)
    total = heard.to(tl.float32)
    g = tl.arange(0, PAD)
    code = tl.load(codes + slot * GROUPS + g, mask=g < GROUPS, other=-1).to(tl.int64)
    entry = tl.maximum(code, 0) + tl.load(offsets + g, mask=g < GROUPS, other=0)
    at = codec_table + entry[:, None] * H + h[None, :]
    total += tl.sum(tl.load(at, mask=(code >= 0)[:, None] & ok[None, :], other=0.0).to(tl.float32), 0)
    tl.store(hidden + row * H + h, total, mask=ok)
    next_gain = tl.load(gain + h, mask=ok, other=0.0).to(tl.float32)
    tl.store(scaled + row * H + h, (total * next_gain).to(scaled.dtype.element_ty), mask=ok)
    tl.store(squares + row, tl.sum(total * total, 0))


@triton.jit
def _norm_rows(
    x, squares_in, gain, normed, next_gain, hidden, scaled, squares, eps,
    H: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    ok = h < H
    let_next_start(PDL)
    weight = tl.load(gain + h, mask=ok, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    total = tl.sum(tl.load(squares_in + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
    y = tl.load(x + row * H + h, mask=ok, other=0.0) * tl.rsqrt(total / H + eps) * weight
    y = y.to(normed.dtype.element_ty)
    tl.store(normed + row * H + h, y, mask=ok)
    y = y.to(tl.float32)
    tl.store(hidden + row * H + h, y, mask=ok)
    following = tl.load(next_gain + h, mask=ok, other=0.0).to(tl.float32)
    tl.store(scaled + row * H + h, (y * following).to(scaled.dtype.element_ty), mask=ok)
    tl.store(squares + row, tl.sum(y * y, 0))


@triton.jit
def _finish_step(
    slots, frame_codes, codes, length, position, frame, spare,
    GROUPS: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, PAD)
    ok = g < GROUPS
    let_next_start(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(codes + slot * GROUPS + g, tl.load(frame_codes + row * GROUPS + g, mask=ok), mask=ok)
    if slot != spare:
        tl.store(length + slot, tl.load(length + slot) + 1)
        tl.store(position + slot, tl.load(position + slot) + 1)
        tl.store(frame + slot, tl.load(frame + slot) + 1)


def embed_step(
    slots: torch.Tensor,
    text_ids: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    codec_table: torch.Tensor,
    text_table: torch.Tensor,
    gain: torch.Tensor,
    out: Residual,
    pdl: bool = False,
    other_rows: torch.Tensor | None = None,
) -> None:
    """``out[row] = sum over groups of codec_table[codes[slot, group] + offsets[group]] + text_table[text_ids[row]]``.

    slots, text_ids [rows]; codes [slots, groups], negative: no code there; tables [entries, H]; gain [H]: of the norm
    that follows; ``other_rows`` [rows, H]: takes the text's place where the text id is negative.
    """
    h = text_table.shape[1]
    _embed_step[(slots.shape[0],)](
        slots, text_ids, codes, offsets, codec_table, text_table, other_rows, gain,
        out.hidden, out.scaled, out.squares,
        H=h, GROUPS=codes.shape[1], PAD=triton.next_power_of_2(codes.shape[1]),
        BLOCK_H=triton.next_power_of_2(h), OTHER=other_rows is not None, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


def norm_rows(
    x: Residual,
    gain: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    next_gain: torch.Tensor,
    out: Residual,
    pdl: bool = False,
) -> None:
    """RMSNorm of the residual stream: ``normed`` [rows, H] in the weights' dtype, and the same as a new stream
    ``out`` in front of a norm with ``next_gain``.
    """
    rows, h = x.hidden.shape
    _norm_rows[(rows,)](
        x.hidden, x.squares, gain, normed, next_gain, out.hidden, out.scaled, out.squares, eps,
        H=h, PARTS=x.squares.shape[1], BLOCK_H=triton.next_power_of_2(h), PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


def finish_step(
    slots: torch.Tensor,
    frame_codes: torch.Tensor,
    codes: torch.Tensor,
    length: torch.Tensor,
    position: torch.Tensor,
    frame: torch.Tensor,
    spare: int,
    pdl: bool = False,
) -> None:
    """Leave the new frame and the advanced counters in each row's slot; ``spare`` only takes codes."""
    groups = codes.shape[1]
    _finish_step[(slots.shape[0],)](
        slots, frame_codes, codes, length, position, frame, spare,
        GROUPS=groups, PAD=triton.next_power_of_2(groups), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
