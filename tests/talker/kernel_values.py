"""What goes into the kernels, and how what comes out is compared."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
EPS = 1e-6

if INTERPRETED or ON_GPU:
    from triton_omni.talker.kernels.linear import Residual


def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def gains(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(size, device=DEVICE) + 0.5).to(dtype)


def unwritten(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a kernel must fill completely."""
    return torch.full(size, float("nan"), device=DEVICE, dtype=dtype)


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain.float()


def stream(x: torch.Tensor, gain: torch.Tensor) -> Residual:
    """``x`` in front of a norm, its squares in three pieces of unequal size."""
    cut = x.shape[1] // 2
    pieces = (x[:, :cut], x[:, cut : cut + 3], x[:, cut + 3 :])
    squares = torch.stack([piece.pow(2).sum(1) for piece in pieces], 1).contiguous()
    return Residual(x, (x * gain.float()).to(gain.dtype), squares)


def fresh_stream(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> Residual:
    return Residual(unwritten(rows, hidden), unwritten(rows, hidden, dtype=dtype), unwritten(rows, parts))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """By norm: the tolerance is what rounding to the result's dtype leaves, and some sums in another order."""
    limit = 1e-2 if torch.bfloat16 in (got.dtype, expected.dtype) else 2e-6
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < limit, float(error)


def is_stream_of(got: Residual, hidden: torch.Tensor, gain: torch.Tensor, limit_dtype: torch.dtype) -> None:
    close(got.hidden.to(limit_dtype), hidden.to(limit_dtype))
    close(got.scaled, got.hidden * gain.float())
    close(got.squares.sum(1), got.hidden.pow(2).sum(1))
