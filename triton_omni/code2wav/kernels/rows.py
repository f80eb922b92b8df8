"""What a step does token by token: embedding and angles, norms, the depthwise convolution, the wave itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_omni.code2wav.kernels.conv import Conv


@triton.jit(do_not_specialize=["frames"])
def _embed(
    codes, positions, table, frequencies, stream, rotary, frames,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    ok = c < C
    total = tl.zeros((BLOCK_C,), tl.float32)
    for group in range(GROUPS):
        entry = tl.load(codes + token * GROUPS + group) + group * SIZE
        total += tl.load(table + entry * C + c, mask=ok, other=0.0).to(tl.float32)
    tl.store(stream + token * C + c, total / GROUPS, mask=ok)
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK_D)
    frame = tl.load(positions + token // frames) + token % frames
    angle = frame.to(tl.float32) * tl.load(frequencies + d, mask=d < HALF, other=0.0)
    tl.store(rotary + token * D + d, tl.cos(angle), mask=d < HALF)
    tl.store(rotary + token * D + HALF + d, tl.sin(angle), mask=d < HALF)


def embed(
    codes: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    frequencies: torch.Tensor,
    stream: torch.Tensor,
    rotary: torch.Tensor,
) -> None:
    """The mean of each frame's code embeddings, and the angles of its absolute frame number.

    codes int32 [batch, frames, groups]; positions int32 [batch]; table [groups * size, C]; frequencies float32 [D / 2];
    stream float32 [batch * frames, C]; rotary float32 [batch * frames, D]: cosines, then sines. Frame numbers are
    exact in float32 up to 2^24.
    """
    batch, frames, groups = codes.shape
    channels, d = table.shape[1], 2 * frequencies.shape[0]
    _embed[(batch * frames,)](
        codes, positions, table, frequencies, stream, rotary, frames,
        GROUPS=groups, SIZE=table.shape[0] // groups, C=channels, D=d,
        BLOCK_C=triton.next_power_of_2(channels), BLOCK_D=triton.next_power_of_2(d // 2), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rms_norm(x, gain, out, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    ok = c < C
    h = tl.load(x + row * C + c, mask=ok, other=0.0)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / C + eps) * tl.load(gain + c, mask=ok, other=0.0)
    tl.store(out + row * C + c, h.to(out.dtype.element_ty), mask=ok)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor, rows: int) -> None:
    """x flat float32 [rows, C] -> out [rows, C]; gain float32 [C]."""
    channels = gain.shape[0]
    _rms_norm[(rows,)](x, gain, out, eps, C=channels, BLOCK_C=triton.next_power_of_2(channels), num_warps=4)


@triton.jit(do_not_specialize=["columns"])
def _depthwise_norm(
    x, w, bias, gain, shift, out, eps, columns, TAPS: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr
):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    ok = c < C
    at = x + (row + row // columns * (TAPS - 1)) * C + c
    acc = tl.load(bias + c, mask=ok, other=0.0)
    for tap in range(TAPS):
        tap_w = tl.load(w + tap * C + c, mask=ok, other=0.0)
        acc += tl.load(at + tap * C, mask=ok, other=0.0).to(tl.float32) * tap_w
    mean = tl.sum(acc, 0) / C
    centred = tl.where(ok, acc - mean, 0.0)
    h = centred * tl.rsqrt(tl.sum(centred * centred, 0) / C + eps)
    h = h * tl.load(gain + c, mask=ok, other=0.0) + tl.load(shift + c, mask=ok, other=0.0)
    tl.store(out + row * C + c, h.to(out.dtype.element_ty), mask=ok)


def depthwise_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    batch: int,
    columns: int,
) -> None:
    """Depthwise causal convolution, then LayerNorm. x: flat storage of [batch, taps - 1 + columns, C]; w float32
    [taps, C]; bias, gain, shift float32 [C]; out [batch, columns, C]."""
    taps, channels = w.shape
    _depthwise_norm[(batch * columns,)](
        x, w, bias, gain, shift, out, eps, columns,
        TAPS=taps, C=channels, BLOCK_C=triton.next_power_of_2(channels), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns"])
def _wave(
    x, w, bias, out, rows, columns, TAPS: tl.constexpr, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    row = tl.minimum(m, rows - 1)
    at = x + ((row + row // columns * (TAPS - 1)) * C)[:, None] + c[None, :]
    acc = tl.zeros((BLOCK_M,), tl.float32) + tl.load(bias)
    for c0 in range(0, C, BLOCK_C):
        total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        for tap in range(TAPS):
            tap_w = tl.load(w + tap * C + c0 + c)
            total += tl.load(at + (tap * C + c0)).to(tl.float32) * tap_w[None, :]
        acc += tl.sum(total, 1)
    tl.store(out + m, tl.minimum(tl.maximum(acc, -1.0), 1.0), mask=m < rows)


def wave(x: torch.Tensor, last: Conv, out: torch.Tensor, batch: int, columns: int) -> None:
    """The last convolution, to one channel, clamped to [-1, 1]. x: flat storage of [batch, taps - 1 + columns, C];
    ``last.weight`` float32 [taps * C, 1]; out float32 [batch, columns].
    """
    block_c = min(32, last.channels_in & -last.channels_in)
    rows, block_m = batch * columns, 128
    _wave[(triton.cdiv(rows, block_m),)](
        x, last.weight, last.bias, out, rows, columns,
        TAPS=last.taps, C=last.channels_in, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
