"""Decode attention of one new token per row over that row's slot, with everything in front of it: query and key norm,
rotary embedding and the write into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_omni.talker.kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def _rotate(first, second, weight_first, weight_second, cos, sin, eps, D: tl.constexpr):
    """RMSNorm over both halves of the head, then the rotation; first, second: float32 [heads, D / 2]."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
    first = first * scale * weight_first[None, :]
    second = second * scale * weight_second[None, :]
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def _new_key(qkv, k_gain, cache, row, kv, cos, sin, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Halves of the row's key, normed and turned, and of its value; each [1, D / 2] in the cache's dtype."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    one = tl.arange(0, 1)
    at = qkv + row * (HEADS + 2 * KV_HEADS) * D + (HEADS + kv) * D + one[:, None] * D + d[None, :]
    gain1 = tl.load(k_gain + d).to(tl.float32)
    gain2 = tl.load(k_gain + HALF + d).to(tl.float32)
    k1, k2 = _rotate(tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32), gain1, gain2, cos, sin, eps, D)
    v1 = tl.load(at + KV_HEADS * D)
    v2 = tl.load(at + KV_HEADS * D + HALF)
    kind = cache.dtype.element_ty
    return k1.to(kind), k2.to(kind), v1.to(kind), v2.to(kind)


@triton.jit
def _store_key(at, cache_kv, k1, k2, v1, v2, D: tl.constexpr):
    HALF: tl.constexpr = D // 2
    new = at + tl.arange(0, 1)[:, None] * D + tl.arange(0, HALF)[None, :]
    tl.store(new, k1)
    tl.store(new + HALF, k2)
    tl.store(new + cache_kv, v1)
    tl.store(new + cache_kv + HALF, v2)


@triton.jit
def _write_keys(
    qkv, k_gain, rotary, index, slots, cache, eps, cache_slot, cache_kv, cache_head, cache_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    let_next_start(PDL)
    wait_for_previous(PDL)
    cos = tl.load(rotary + row * D + d)
    sin = tl.load(rotary + row * D + HALF + d)
    k1, k2, v1, v2 = _new_key(qkv, k_gain, cache, row, kv, cos, sin, eps, HEADS, KV_HEADS, D)
    slot = tl.load(slots + row).to(tl.int64)
    at = cache + slot * cache_slot + kv * cache_head + tl.load(index + row).to(tl.int64) * cache_token
    _store_key(at, cache_kv, k1, k2, v1, v2, D)


@triton.jit(do_not_specialize=["token"])
def _decode_attention(
    qkv, q_gain, k_gain, rotary, positions, lengths, slots, cache, out, eps, softmax_scale,
    cache_slot, cache_kv, cache_head, cache_token, token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BY_SLOT: tl.constexpr, WRITE: tl.constexpr,
    UNIFORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    g = tl.arange(0, GROUP_PAD)
    g_ok = (g < GROUP)[:, None]
    let_next_start(PDL)
    wait_for_previous(PDL)
    if UNIFORM:  # every row stands at the same token of a slot of its own
        slot, position, length = row, token.to(tl.int64), token
    else:
        slot = tl.load(slots + row).to(tl.int64)
        counted = slot if BY_SLOT else row
        position = tl.load(positions + counted).to(tl.int64)
        length = tl.load(lengths + counted).to(tl.int32)
    cos = tl.load(rotary + position * D + d)
    sin = tl.load(rotary + position * D + HALF + d)

    q_at = qkv + row * (HEADS + 2 * KV_HEADS) * D + (kv * GROUP + g)[:, None] * D + d[None, :]
    q1 = tl.load(q_at, mask=g_ok, other=0.0).to(tl.float32)
    q2 = tl.load(q_at + HALF, mask=g_ok, other=0.0).to(tl.float32)
    gq1 = tl.load(q_gain + d).to(tl.float32)
    gq2 = tl.load(q_gain + HALF + d).to(tl.float32)
    q1, q2 = _rotate(q1, q2, gq1, gq2, cos, sin, eps, D)
    q1 = (q1 * softmax_scale).to(cache.dtype.element_ty)
    q2 = (q2 * softmax_scale).to(cache.dtype.element_ty)

    k1, k2, v1, v2 = _new_key(qkv, k_gain, cache, row, kv, cos, sin, eps, HEADS, KV_HEADS, D)
    base = cache + slot * cache_slot + kv * cache_head
    if WRITE:
        _store_key(base + length.to(tl.int64) * cache_token, cache_kv, k1, k2, v1, v2, D)

    # the new token opens the running softmax, so that nothing just written is read back
    top = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)
    total = tl.full((GROUP_PAD,), 1.0, tl.float32)
    acc1 = tl.zeros((GROUP_PAD, HALF), tl.float32) + v1.to(tl.float32)
    acc2 = tl.zeros((GROUP_PAD, HALF), tl.float32) + v2.to(tl.float32)
    t = tl.arange(0, BLOCK_T)
    for t0 in range(0, length, BLOCK_T):
        ok = (t0 + t) < length
        at = base + (t0 + t).to(tl.int64)[:, None] * cache_token + d[None, :]
        kt1 = tl.load(at, mask=ok[:, None], other=0.0)
        kt2 = tl.load(at + HALF, mask=ok[:, None], other=0.0)
        scores = tl.dot(q1, tl.trans(kt1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(kt2), scores, input_precision=PRECISION)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - peak)
        p = tl.exp(scores - peak[:, None])
        total = total * shrink + tl.sum(p, 1)
        p = p.to(cache.dtype.element_ty)
        vt1 = tl.load(at + cache_kv, mask=ok[:, None], other=0.0)
        vt2 = tl.load(at + cache_kv + HALF, mask=ok[:, None], other=0.0)
        acc1 = tl.dot(p, vt1, acc1 * shrink[:, None], input_precision=PRECISION)
        acc2 = tl.dot(p, vt2, acc2 * shrink[:, None], input_precision=PRECISION)
        top = peak
    o_at = out + row * HEADS * D + (kv * GROUP + g)[:, None] * D + d[None, :]
    tl.store(o_at, (acc1 / total[:, None]).to(out.dtype.element_ty), mask=g_ok)
    tl.store(o_at + HALF, (acc2 / total[:, None]).to(out.dtype.element_ty), mask=g_ok)


def decode_attention(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    eps: float,
    rotary: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    *,
    by_slot: bool,
    write: bool = True,
    pdl: bool = False,
) -> None:
    """One token per row attends to its slot's past and to itself, and (``write``) is put there.

    qkv [rows, (heads + 2 kv_heads) * D]: queries, keys, values as projected; q_gain, k_gain [D]: their RMSNorm; rotary
    float32 [positions, D]: cosines of the D / 2 angles, then sines; ``positions``: which row of it; ``lengths``: tokens
    in front of this one in its slot; both integers, ``by_slot`` [slots] or else [rows]; slots [rows]; cache
    [slots, 2, kv_heads, max_context, D]: keys and values; out [rows, heads * D]. Reads only what the length covers.
    """
    block_t, stages = (128, 3) if cache.itemsize == 2 else (32, 2)
    _attend(
        qkv, q_gain, k_gain, eps, rotary, positions, lengths, slots, cache, out,
        token=0, by_slot=by_slot, write=write, uniform=False, block_t=block_t, warps=4, stages=stages, pdl=pdl,
    )  # fmt: skip


def frame_attention(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    eps: float,
    rotary: torch.Tensor,
    token: int,
    cache: torch.Tensor,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """``decode_attention`` where every row is at ``token`` of the short sequence cache[row]."""
    _attend(
        qkv, q_gain, k_gain, eps, rotary, None, None, None, cache, out,
        token=token, by_slot=False, write=True, uniform=True, block_t=16, warps=1, stages=1, pdl=pdl,
    )  # fmt: skip


def _attend(
    qkv, q_gain, k_gain, eps, rotary, positions, lengths, slots, cache, out,
    *, token, by_slot, write, uniform, block_t, warps, stages, pdl,
):  # fmt: skip
    kv_heads, d = cache.shape[2], cache.shape[4]
    heads = out.shape[1] // d
    group = heads // kv_heads
    _decode_attention[(qkv.shape[0], kv_heads)](
        qkv, q_gain, k_gain, rotary, positions, lengths, slots, cache, out, eps, d**-0.5,
        cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3), token,
        HEADS=heads, KV_HEADS=kv_heads, D=d, BLOCK_T=block_t,
        PRECISION="ieee" if cache.dtype == torch.float32 else "tf32",
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), BY_SLOT=by_slot, WRITE=write, UNIFORM=uniform,
        PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


def write_keys(
    qkv: torch.Tensor,
    k_gain: torch.Tensor,
    eps: float,
    rotary: torch.Tensor,
    index: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Put each row's key and value at ``index[row]`` of its slot, for rows that attend to each other afterwards.

    As ``decode_attention``; rotary float32 [rows, D]: each row's own angles.
    """
    kv_heads, d = cache.shape[2], cache.shape[4]
    heads = qkv.shape[1] // d - 2 * kv_heads
    _write_keys[(qkv.shape[0], kv_heads)](
        qkv, k_gain, rotary, index, slots, cache, eps,
        cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3),
        HEADS=heads, KV_HEADS=kv_heads, D=d, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
