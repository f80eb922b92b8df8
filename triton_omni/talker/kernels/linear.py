"""Matrix products of a decode step: few rows, weights streamed once, norm in front and residual or SwiGLU behind."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from triton_omni.talker.kernels.overlap import let_next_start, wait_for_previous

PLAIN, RESIDUAL, SWIGLU = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program: ``block_m`` rows by ``block_n`` outputs, the inner dimension in steps of ``block_k``."""

    block_m: int = 64
    block_n: int = 16
    block_k: int = 128
    warps: int = 4
    stages: int = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream in front of a norm. ``hidden`` float32 [rows, H]; ``scaled`` [rows, H]: the same times the
    norm's gain, in the weights' dtype; ``squares`` float32 [rows, parts]: sums of squares by column tile. A product
    with the normed stream is the product with ``scaled``, divided by the root mean square afterwards: nothing waits.
    """

    hidden: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


@triton.jit
def inverse_rms(squares, m, m_ok, eps, K: tl.constexpr, PARTS: tl.constexpr):
    """1 / root mean square of rows ``m``, float32."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    at = squares + m.to(tl.int64)[:, None] * PARTS + part[None, :]
    pieces = tl.load(at, mask=m_ok[:, None] & (part < PARTS)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(pieces, 1) / K + eps)


@triton.jit(do_not_specialize=["rows"])  # one binary for all buckets
def _linear(
    x, squares, w, out, residual, gain, scaled_out, squares_out, rows, eps,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, PARTS_OUT: tl.constexpr,
    NORM: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_ok = m < rows
    n_ok = n < N
    m_wide = m.to(tl.int64)
    let_next_start(PDL)
    wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k_ok = (k0 + k) < K
        xt = tl.load(x + m_wide[:, None] * K + (k0 + k)[None, :], mask=m_ok[:, None] & k_ok[None, :], other=0.0)
        w_ok = n_ok[:, None] & k_ok[None, :]
        w_at = w + n[:, None] * K + (k0 + k)[None, :]
        acc = tl.dot(xt, tl.trans(tl.load(w_at, mask=w_ok, other=0.0)), acc, input_precision=PRECISION)
        if EPILOGUE == 2:  # rows N.. of the weight are the up projection
            wu = tl.load(w_at + N * K, mask=w_ok, other=0.0)
            up = tl.dot(xt, tl.trans(wu), up, input_precision=PRECISION)
    if NORM:
        scale = inverse_rms(squares, m, m_ok, eps, K, PARTS)[:, None]
        acc = acc * scale
        up = up * scale
    at = m_wide[:, None] * N + n[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    if EPILOGUE == 0:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok)
    elif EPILOGUE == 1:
        h = acc + tl.load(residual + at, mask=ok, other=0.0)
        tl.store(out + at, h, mask=ok)
        tl.store(squares_out + m_wide * PARTS_OUT + tile_n, tl.sum(h * h, 1), mask=m_ok)
        next_gain = tl.load(gain + n, mask=n_ok, other=0.0).to(tl.float32)
        tl.store(scaled_out + at, (h * next_gain[None, :]).to(scaled_out.dtype.element_ty), mask=ok)
    else:
        gate = acc / (1.0 + tl.exp(-acc))
        tl.store(out + at, (gate * up).to(out.dtype.element_ty), mask=ok)


def _launch(x, w, out, n, tile, pdl, *, epilogue, squares=None, residual=None, gain=None, eps=0.0):
    rows, k = x.shape
    grid = (triton.cdiv(n, tile.block_n), triton.cdiv(rows, tile.block_m))
    stream = out if isinstance(out, Residual) else None
    _linear[grid](
        x, squares, w, stream.hidden if stream else out, residual, gain,
        stream.scaled if stream else None, stream.squares if stream else None, rows, eps,
        K=k, N=n, PARTS=squares.shape[1] if squares is not None else 1,
        PARTS_OUT=stream.squares.shape[1] if stream else 1,
        NORM=squares is not None, EPILOGUE=epilogue, PRECISION="ieee" if w.dtype == torch.float32 else "tf32",
        PDL=pdl, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def linear(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tile: Tile, pdl: bool = False) -> None:
    """``out[rows, N] = x[rows, K] @ w[N, K].T``."""
    _launch(x, w, out, w.shape[0], tile, pdl, epilogue=PLAIN)


def norm_linear(x: Residual, eps: float, w: torch.Tensor, out: torch.Tensor, tile: Tile, pdl: bool = False) -> None:
    """``out[rows, N] = rms_norm(x) @ w[N, K].T``; the gain is already in ``x.scaled``."""
    _launch(x.scaled, w, out, w.shape[0], tile, pdl, epilogue=PLAIN, squares=x.squares, eps=eps)


def norm_swiglu(x: Residual, eps: float, w: torch.Tensor, out: torch.Tensor, tile: Tile, pdl: bool = False) -> None:
    """``out[rows, N] = silu(y @ gate.T) * (y @ up.T)`` with ``y = rms_norm(x)`` and ``w[2 N, K]`` gate above up."""
    _launch(x.scaled, w, out, w.shape[0] // 2, tile, pdl, epilogue=SWIGLU, squares=x.squares, eps=eps)


def residual_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    out: Residual,
    tile: Tile,
    pdl: bool = False,
) -> None:
    """``out = residual + x @ w.T`` in front of a norm with ``gain``; one piece of squares per ``tile.block_n`` columns.
    ``residual`` may be ``out.hidden``.
    """
    _launch(x, w, out, w.shape[0], tile, pdl, epilogue=RESIDUAL, residual=residual, gain=gain)
