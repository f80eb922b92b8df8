"""Causal convolutions as one implicit matrix product, with everything elementwise that follows them."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

IDENTITY, SNAKE, GELU, SWIGLU = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program: ``block_m`` columns of the batch by ``block_n`` + ``block_n2`` outputs; the inner
    dimension in steps of ``block_k``. Two widths cover 96 or 192 channels, no powers of two, without padding.
    """

    block_m: int = 128
    block_n: int = 64
    block_n2: int = 0
    block_k: int = 64
    warps: int = 4
    stages: int = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Conv:
    """A causal convolution's parameters. ``weight`` [taps * channels_in, outputs], oldest tap first; outputs are
    ``channels_out`` of each sample that one column makes (``outputs / channels_out`` of them). ``bias`` and ``scale``
    float32 [outputs]: (x * weight + bias) * scale.
    """

    weight: torch.Tensor
    taps: int
    channels_in: int
    channels_out: int
    dilation: int = 1
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def head(self) -> int:
        """Columns of the past that it reads."""
        return (self.taps - 1) * self.dilation

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    @property
    def samples(self) -> int:
        """Columns of the output per column of the input."""
        return self.outputs // self.channels_out


@dataclasses.dataclass(frozen=True, slots=True)
class Snake:
    """SnakeBeta's constants: x + sin²(x * frequency) * magnitude; both float32 [channels]."""

    frequency: torch.Tensor
    magnitude: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a convolution writes for the next one: ``data``, flat storage of [batch, head + columns,
    channels]. ``lag`` and ``rate``: which of them do not exist yet, as in ``slots.Span``; those become zero.
    """

    data: torch.Tensor
    head: int = 0
    lag: int = 0
    rate: int = 1
    positions: torch.Tensor | None = None


@triton.jit
def _snake(x, frequency, magnitude):
    # sin² has period pi: reduce to the nearest multiple (rounded by adding 1.5 * 2^23), then sin by its series.
    # Exact enough up to arguments of 1e5, at a quarter of the instructions of a general sine.
    y = x * frequency
    turns = (y * 0.3183098861837907 + 12582912.0) - 12582912.0
    y = (y - turns * 3.140625) - turns * 9.676535897932e-4
    s = y * y
    sine = y + y * s * (-0.16666667 + s * (8.3333333e-3 + s * (-1.9841270e-4 + s * 2.7557319e-6)))
    return x + sine * sine * magnitude


@triton.jit
def _activate(acc, gate, channel, frequency, magnitude, ACT: tl.constexpr):
    if ACT == 1:
        acc = _snake(acc, tl.load(frequency + channel)[None, :], tl.load(magnitude + channel)[None, :])
    elif ACT == 2:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    elif ACT == 3:
        acc = gate / (1.0 + tl.exp(-gate)) * acc
    return acc


@triton.jit
def _weights(at, n, width, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=(n < width)[None, :], other=0.0)


@triton.jit
def _emit(
    acc, gate, n, rows_ok, at_row, at_batch, at_column, bias, scale, residual, stream, act, frequency, magnitude,
    positions, head_out,
    N: tl.constexpr, COUT: tl.constexpr, RATE: tl.constexpr, LAG: tl.constexpr, ACT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    SAMPLES: tl.constexpr = N // COUT
    sample = n // COUT
    channel = n % COUT
    n_ok = n < N
    ok = rows_ok[:, None]
    if not EVEN:
        ok = ok & n_ok[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n_ok, other=0.0)[None, :]
    if scale is not None:
        acc *= tl.load(scale + n, mask=n_ok, other=0.0)[None, :]
    at = at_row[:, None] * N + n[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=ok, other=0.0)
    if stream is not None:
        tl.store(stream + at, acc, mask=ok)
    if act is not None:
        acc = _activate(acc, gate, channel, frequency, magnitude, ACT)
        if LAG > 0:
            position = tl.minimum(tl.load(positions + at_batch), LAG)  # so large that nothing is absent
            first = LAG - position * RATE - at_column * SAMPLES
            acc = tl.where(sample[None, :] < first[:, None], 0.0, acc)
        at = ((at_row * SAMPLES + (at_batch + 1) * head_out) * COUT)[:, None] + n[None, :]
        tl.store(act + at, acc.to(act.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "columns", "dilation", "head_out"])
def _conv(
    x, w, bias, scale, residual, stream, act, frequency, magnitude, positions, rows, columns, dilation, head_out,
    TAPS: tl.constexpr, CIN: tl.constexpr, N: tl.constexpr, COUT: tl.constexpr, RATE: tl.constexpr, LAG: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACT == 3
    WIDTH: tl.constexpr = N * 2 if GATED else N  # of the weights
    TILE: tl.constexpr = BLOCK_N if GATED else BLOCK_N + BLOCK_N2
    EVEN: tl.constexpr = N % TILE == 0
    TILES: tl.constexpr = (N + TILE - 1) // TILE
    program = tl.program_id(0)  # neighbours read the same columns
    m = (program // TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    n1 = (program % TILES) * TILE + tl.arange(0, BLOCK_N)
    SECOND: tl.constexpr = BLOCK_N2 if BLOCK_N2 > 0 else BLOCK_N
    n2 = (program % TILES) * TILE + (N if GATED else BLOCK_N) + tl.arange(0, SECOND)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(m, rows - 1)
    batch = row // columns
    x_at = x + ((row + batch * ((TAPS - 1) * dilation)) * CIN)[:, None] + k[None, :]
    w1_at = w + k[:, None] * WIDTH + n1[None, :]
    w2_at = w + k[:, None] * WIDTH + n2[None, :]
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc2 = tl.zeros((BLOCK_M, SECOND), tl.float32)
    STEPS: tl.constexpr = CIN // BLOCK_K
    for step in range(TAPS * STEPS):
        tap = step // STEPS
        xt = tl.load(x_at + (tap * dilation * CIN + (step - tap * STEPS) * BLOCK_K))
        down = step * (BLOCK_K * WIDTH)
        acc1 = tl.dot(xt, _weights(w1_at + down, n1, N, EVEN), acc1, input_precision=PRECISION)
        if BLOCK_N2 > 0:
            acc2 = tl.dot(xt, _weights(w2_at + down, n2, WIDTH, EVEN), acc2, input_precision=PRECISION)
    ok = m < rows
    column = row - batch * columns
    if GATED:
        _emit(
            acc2, acc1, n1, ok, row, batch, column, bias, scale, residual, stream, act, frequency, magnitude, positions,
            head_out, N, COUT, RATE, LAG, ACT, EVEN,
        )  # fmt: skip
    else:
        _emit(
            acc1, acc1, n1, ok, row, batch, column, bias, scale, residual, stream, act, frequency, magnitude, positions,
            head_out, N, COUT, RATE, LAG, ACT, EVEN,
        )  # fmt: skip
        if BLOCK_N2 > 0:
            _emit(
                acc2, acc2, n2, ok, row, batch, column, bias, scale, residual, stream, act, frequency, magnitude,
                positions, head_out, N, COUT, RATE, LAG, ACT, EVEN,
            )  # fmt: skip


def conv(
    x: torch.Tensor,
    parameters: Conv,
    batch: int,
    columns: int,
    tile: Tile,
    *,
    residual: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
    act: Columns | None = None,
    activation: int = IDENTITY,
    snake: Snake | None = None,
) -> None:
    """y = (conv(x) + bias) * scale + residual, to ``stream`` as it is and to ``act`` through the activation.

    x: flat storage of [batch, head + columns, channels_in]; residual and stream, maybe the same: float32 [batch,
    columns * samples, channels_out]; ``act.data``: [batch, act.head + columns * samples, channels_out]. ``snake``
    implies its activation. SWIGLU: weight [.., gate | up], channels_out is the width of one.
    """
    gated = activation == SWIGLU
    outputs = parameters.outputs // 2 if gated else parameters.outputs
    rows = batch * columns
    wide = tile.block_n if gated else tile.block_n + tile.block_n2
    _conv[(triton.cdiv(rows, tile.block_m) * triton.cdiv(outputs, wide),)](
        x, parameters.weight, parameters.bias, parameters.scale, residual, stream, act.data if act else None,
        snake.frequency if snake else None, snake.magnitude if snake else None, act.positions if act else None,
        rows, columns, parameters.dilation, act.head if act else 0,
        TAPS=parameters.taps, CIN=parameters.channels_in, N=outputs, COUT=parameters.channels_out,
        RATE=act.rate if act else 1, LAG=act.lag if act else 0, ACT=SNAKE if snake else activation,
        PRECISION="ieee" if parameters.weight.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_N2=tile.block_n if gated else tile.block_n2,
        BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
