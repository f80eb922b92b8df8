"""Sliding-window attention of a step's frames over their session's ring of past frames and over themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _turned(at, cos, sin, ok, HALF: tl.constexpr):
    """Both halves of a head's vectors [frames, D / 2], rotated (halves convention)."""
    first = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["frames"])
def _attend(
    qkv, rotary, keys, values, slots, positions, lengths, out, frames, softmax_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    kv = tl.program_id(0)
    batch = tl.program_id(1)
    position = tl.load(positions + batch)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    d_ok = (d < HALF)[None, :]
    ok = (t < frames)[:, None] & d_ok
    token = batch * frames + t
    angle = rotary + (token * D)[:, None] + d[None, :]
    cos = tl.load(angle, mask=ok, other=0.0)
    sin = tl.load(angle + HALF, mask=ok, other=0.0)
    base = qkv + (token * QKV)[:, None] + d[None, :]
    kind = keys.dtype.element_ty
    k1, k2 = _turned(base + (HEADS + kv) * D, cos, sin, ok, HALF)
    k1 = k1.to(kind)
    k2 = k2.to(kind)
    v1 = tl.load(base + (HEADS + KV_HEADS + kv) * D, mask=ok, other=0.0)
    v2 = tl.load(base + (HEADS + KV_HEADS + kv) * D + HALF, mask=ok, other=0.0)
    own = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - WINDOW) & (t[None, :] < frames)
    ring = (tl.load(slots + batch) * WINDOW * KV_HEADS + kv) * D
    s = tl.arange(0, BLOCK_S)
    for g in tl.static_range(GROUP):
        q1, q2 = _turned(base + (kv * GROUP + g) * D, cos, sin, ok, HALF)
        q1 = (q1 * softmax_scale).to(kind)
        q2 = (q2 * softmax_scale).to(kind)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        scores = tl.where(own, scores, -1e30)
        top = tl.max(scores, 1)
        p = tl.exp(scores - top[:, None])
        total = tl.sum(p, 1)
        p = p.to(kind)
        acc1 = tl.dot(p, v1, input_precision=PRECISION)
        acc2 = tl.dot(p, v2, input_precision=PRECISION)
        for s0 in range(0, WINDOW, BLOCK_S):
            place = s0 + s  # holds the last frame before ``position`` that is congruent to it
            frame = position - 1 - (position - 1 - place + WINDOW) % WINDOW
            exists = (place < WINDOW) & (frame >= 0)
            at = ring + (place * KV_HEADS * D)[:, None] + d[None, :]
            past_ok = exists[:, None] & d_ok
            old1 = tl.load(keys + at, mask=past_ok, other=0.0)
            old2 = tl.load(keys + at + HALF, mask=past_ok, other=0.0)
            past = tl.dot(q1, tl.trans(old1), input_precision=PRECISION)
            past = tl.dot(q2, tl.trans(old2), past, input_precision=PRECISION)
            visible = exists[None, :] & (frame[None, :] > (position + t - WINDOW)[:, None])
            past = tl.where(visible, past, -1e30)
            peak = tl.maximum(top, tl.max(past, 1))
            shrink = tl.exp(top - peak)
            weights = tl.exp(past - peak[:, None])
            total = total * shrink + tl.sum(weights, 1)
            weights = weights.to(kind)
            old1 = tl.load(values + at, mask=past_ok, other=0.0)
            old2 = tl.load(values + at + HALF, mask=past_ok, other=0.0)
            acc1 = tl.dot(weights, old1, acc1 * shrink[:, None], input_precision=PRECISION)
            acc2 = tl.dot(weights, old2, acc2 * shrink[:, None], input_precision=PRECISION)
            top = peak
        o_at = out + (token * HEADS * D)[:, None] + (kv * GROUP + g) * D + d[None, :]
        tl.store(o_at, (acc1 / total[:, None]).to(out.dtype.element_ty), mask=ok)
        tl.store(o_at + HALF, (acc2 / total[:, None]).to(out.dtype.element_ty), mask=ok)
    tl.debug_barrier()  # every thread has read the ring
    length = tl.load(lengths + batch)
    kept = ((t < length) & (t >= length - WINDOW))[:, None] & d_ok
    at = ring + ((position + t) % WINDOW * KV_HEADS * D)[:, None] + d[None, :]
    tl.store(keys + at, k1, mask=kept)
    tl.store(keys + at + HALF, k2, mask=kept)
    tl.store(values + at, v1, mask=kept)
    tl.store(values + at + HALF, v2, mask=kept)


def window_attention(
    qkv: torch.Tensor,
    rotary: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    frames: int,
    heads: int,
) -> None:
    """Each frame sees the last ``window`` frames of its session, its own included; the frames that count are kept.

    qkv: flat storage of [batch * frames, (heads + 2 kv_heads) * D]; rotary float32 [batch * frames, D], as ``embed``
    writes it; keys, values [slots, window, kv_heads, D]: frame f at f mod window, keys rotated; slots, positions,
    lengths int32 [batch]; out [batch * frames, heads * D].
    """
    window, kv_heads, d = keys.shape[1:]
    _attend[(kv_heads, slots.shape[0])](
        qkv, rotary, keys, values, slots, positions, lengths, out, frames, d**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, D=d, WINDOW=window,
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
        BLOCK_T=max(16, triton.next_power_of_2(frames)), BLOCK_D=max(16, triton.next_power_of_2(d // 2)), BLOCK_S=32,
        num_warps=4, num_stages=2,
    )  # fmt: skip
