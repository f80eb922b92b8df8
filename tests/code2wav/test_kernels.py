"""Each Triton-language kernel equals the same thing written in PyTorch: on a GPU in its own dtypes, else in Triton's
interpreter, which must be chosen before triton is imported and so gets a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from triton_omni.code2wav.buckets import Bucket
from triton_omni.code2wav.layers import SnakeBeta
from triton_omni.code2wav.random_weights import random_code2wav
from triton_omni.code2wav.runner import Row
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.code2wav.transformer import rotate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytest.importorskip("triton")
needs_kernels = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="runs in the interpreter's process, or on a GPU")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
# On a GPU the half-precision operands, in the interpreter also the exact ones, that hide no mistake behind rounding.
DTYPES = [torch.float16] if ON_GPU else [torch.float32, torch.float16]

if INTERPRETED or ON_GPU:
    from triton_omni.code2wav.fidelity import decibels
    from triton_omni.code2wav.fused import FusedDecoder
    from triton_omni.code2wav.graphs import FusedRunner
    from triton_omni.code2wav.kernels import attention, conv, history, rows
    from triton_omni.code2wav.kernels.conv import Columns, Conv, Snake, Tile
    from triton_omni.code2wav.packing import PackedCode2Wav

# Widths that are no powers of two, a group of two heads, a window shorter than a chunk, two upsampling stages.
SHAPE = Code2WavShape(
    code_groups=3, codebook_size=11, hidden_size=32, intermediate_size=48, layers=1, heads=4, kv_heads=2, head_dim=8,
    window=5, rope_theta=1e4, rms_norm_eps=1e-5, attention_bias=False, upsampling_ratios=(2,), upsample_rates=(3, 2),
    decoder_dim=48,
)  # fmt: skip


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="this is the process that starts the interpreter's")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


@pytest.fixture(autouse=True)
def seeded_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def unwritten(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a kernel must fill completely."""
    return torch.full(size, float("nan"), device=DEVICE, dtype=dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the expected values' norm; NaN is never near."""
    assert got.shape == expected.shape
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error <= tolerance, float(error)


def convolved(x: torch.Tensor, weight: torch.Tensor, dilation: int) -> torch.Tensor:
    """x [B, head + L, in], weight [out, in, taps] -> [B, L, out]"""
    return F.conv1d(x.float().transpose(1, 2), weight.float(), dilation=dilation).transpose(1, 2)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [(64, 32), (128, 0), (64, 0)], ids=str)
def test_dilated_convolution_with_residual_and_snake(dtype, width):
    batch, length, channels, outputs, taps, dilation, head = 3, 29, 64, 96, 7, 3, 9
    weight, bias = normal(outputs, channels, taps, dtype=dtype) / 20, normal(outputs)
    x = normal(batch, (taps - 1) * dilation + length, channels, dtype=dtype)
    stream, out = normal(batch, length, outputs), unwritten(batch, head + length, outputs, dtype=dtype)
    act = SnakeBeta(outputs).to(DEVICE)
    act.alpha.data.normal_(0, 1)
    act.beta.data.normal_(0, 1)
    act.prepare()
    layer = Conv(weight.permute(2, 1, 0).flatten(0, 1).contiguous(), taps, channels, outputs, dilation, bias)
    expected = convolved(x, weight, dilation) + bias + stream
    positions, lag, rate = integers(0, 1, 9), 21, 5
    conv.conv(
        x, layer, batch, length, Tile(64, *width, 32, 4, 2), residual=stream, stream=stream,
        act=Columns(out, head, lag, rate, positions), snake=Snake(act.frequency[:, 0], act.magnitude[:, 0]),
    )  # fmt: skip
    assert_near(stream, expected, TOLERANCE[dtype])
    active = act(expected.transpose(1, 2)).transpose(1, 2)
    active[0, :21], active[1, :16] = 0, 0  # what does not exist yet in sessions at frames 0 and 1
    assert_near(out[:, head:], active, TOLERANCE[dtype])
    assert (out[0, head : head + 21] == 0).all()
    assert out[:, :head].isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_convolution_as_two_taps(dtype):
    batch, length, channels, outputs, stride, head = 2, 11, 32, 48, 3, 4
    weight = normal(channels, outputs, 2 * stride, dtype=dtype) / 8
    x = normal(batch, 1 + length, channels, dtype=dtype)
    taps = [weight[..., stride:], weight[..., :stride]]
    packed = torch.cat([tap.transpose(1, 2).flatten(1) for tap in taps])
    out = unwritten(batch, head + length * stride, outputs, dtype=dtype)
    conv.conv(
        x, Conv(packed, 2, channels, outputs), batch, length, Tile(64, 64, 0, 32, 4, 2),
        act=Columns(out, head, 4, 7, integers(0, 1)),
    )  # fmt: skip
    expected = F.conv_transpose1d(x.float().transpose(1, 2), weight.float(), stride=stride)
    expected = expected[..., stride:-stride].transpose(1, 2).clone()
    expected[0, :4] = 0
    assert_near(out[:, head:], expected, TOLERANCE[dtype])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_the_transformer(dtype):
    count, inputs, outputs = 21, 64, 80
    x, weight, scale = normal(count, inputs, dtype=dtype), normal(inputs, 2 * outputs, dtype=dtype) / 8, normal(outputs)
    gate, up = (x.float() @ weight.float()).chunk(2, 1)
    out, stream = unwritten(count, outputs, dtype=dtype), normal(count, outputs)
    gated = Conv(weight, 1, inputs, outputs)
    conv.conv(x, gated, 3, 7, Tile(16, 32, 0, 64, 4, 2), act=Columns(out), activation=conv.SWIGLU)
    assert_near(out, F.silu(gate) * up, TOLERANCE[dtype])

    half = weight[:, :outputs].contiguous()
    conv.conv(x, Conv(half, 1, inputs, outputs), 3, 7, Tile(16, 32, 0, 64), act=Columns(out), activation=conv.GELU)
    assert_near(out, F.gelu(gate), TOLERANCE[dtype])

    expected = gate * scale + stream
    conv.conv(x, Conv(half, 1, inputs, outputs, scale=scale), 3, 7, Tile(16, 32, 0, 64), residual=stream, stream=stream)
    assert_near(stream, expected, TOLERANCE[dtype])


@needs_kernels
def test_the_past_goes_in_front_and_the_last_columns_that_count_are_kept():
    batch, frames, rate, head, channels = 4, 3, 2, 9, 48
    columns = frames * rate
    x, stored = normal(batch, head + columns, channels), normal(6, head, channels)
    slots, positions, lengths = integers(4, 0, 5, 2), integers(0, 7, 3, 9), integers(3, 1, 0, 3)
    expected, past = x.clone(), stored.clone()
    stored[4] = float("nan")  # a fresh session's slot: nobody may look at what it holds
    history.exchange(x, stored, slots, positions, lengths, columns, rate)
    for row, slot in enumerate(slots.tolist()):
        expected[row, :head] = past[slot] if positions[row] else 0
        end = int(lengths[row]) * rate
        past[slot] = expected[row, end : end + head]
    assert torch.equal(x, expected)
    assert torch.equal(stored, past)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frames", [1, 4, 20])
def test_attention_over_the_ring_equals_attention_over_all_frames(dtype, frames):
    """Three sessions: long, fresh with padding, and shorter than the window; then a second step on what is kept."""
    heads, kv_heads, d, window, total = 4, 2, 16, 12, 90
    width = (heads + 2 * kv_heads) * d
    everything = normal(3, total, width, dtype=dtype)
    frequencies = 1e4 ** (-torch.arange(0, d, 2, device=DEVICE) / d)
    keys, values = (normal(5, window, kv_heads, d, dtype=dtype) for _ in range(2))
    slots, done = integers(3, 1, 0), [40, 0, 5]
    angles = torch.arange(total, device=DEVICE)[:, None] * frequencies
    cos, sin = (torch.cat([f(angles)] * 2, 1) for f in (torch.cos, torch.sin))  # [total, D]

    def heads_of(columns: torch.Tensor) -> torch.Tensor:
        return columns.float().unflatten(-1, (-1, d)).transpose(1, 2)  # [3, heads, total, D]

    q, k, v = everything.split([heads * d, kv_heads * d, kv_heads * d], 2)
    q, k, v = rotate(heads_of(q), cos, sin), rotate(heads_of(k), cos, sin), heads_of(v)
    apart = torch.arange(total, device=DEVICE)[:, None] - torch.arange(total, device=DEVICE)
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < window), enable_gqa=True)
    for row, slot in enumerate(slots.tolist()):
        for frame in range(max(0, done[row] - window), done[row]):
            keys[slot, frame % window], values[slot, frame % window] = k[row, :, frame], v[row, :, frame]
    for lengths in ([frames, max(1, frames - 1), frames], [frames] * 3):
        qkv = torch.stack([everything[row, at : at + frames] for row, at in enumerate(done)])
        angle = torch.stack(
            [torch.cat([f(angles[at : at + frames]) for f in (torch.cos, torch.sin)], 1) for at in done]
        )
        out = unwritten(3, frames, heads * d, dtype=dtype)
        attention.window_attention(
            qkv, angle.contiguous(), keys, values, slots, integers(*done), integers(*lengths), out, frames, heads
        )
        for row, (at, length) in enumerate(zip(done, lengths, strict=True)):
            expected = seen[row, :, at : at + length].transpose(0, 1).flatten(1)
            assert_near(out[row, :length], expected, TOLERANCE[dtype])
        done = [at + length for at, length in zip(done, lengths, strict=True)]


@needs_kernels
def test_rows():
    batch, frames, groups, size, channels, taps = 2, 3, 4, 10, 48, 7
    codes = torch.randint(size, (batch, frames, groups), device=DEVICE, dtype=torch.int32)
    table, frequencies = normal(groups * size, channels), torch.rand(8, device=DEVICE)
    stream, rotary = unwritten(batch, frames, channels), unwritten(batch, frames, 16)
    rows.embed(codes, integers(5, 100_000), table, frequencies, stream, rotary)
    entries = codes + torch.arange(groups, device=DEVICE) * size
    assert_near(stream, F.embedding(entries, table).mean(2), 1e-6)
    angles = (torch.tensor([[5], [100_000]], device=DEVICE) + torch.arange(frames, device=DEVICE))[
        ..., None
    ] * frequencies
    assert_near(rotary, torch.cat([angles.cos(), angles.sin()], 2), 1e-5)

    gain, shift, out = normal(channels), normal(channels), unwritten(batch, frames, channels)
    rows.rms_norm(stream, gain, 1e-5, out, batch * frames)
    assert_near(out, F.rms_norm(stream, (channels,), gain, 1e-5), 1e-5)

    x, w, bias = normal(batch, taps - 1 + frames, channels), normal(taps, channels), normal(channels)
    rows.depthwise_norm(x, w, bias, gain, shift, 1e-6, out, batch, frames)
    mixed = F.conv1d(x.transpose(1, 2), w.T[:, None], bias, groups=channels).transpose(1, 2)
    assert_near(out, F.layer_norm(mixed, (channels,), gain, shift, 1e-6), 1e-5)

    last, wave = normal(taps * channels, 1) / 10, unwritten(batch, frames)
    rows.wave(x, Conv(last, taps, channels, 1, bias=bias[:1]), wave, batch, frames)
    expected = convolved(x, last.view(taps, channels).T[None], 1)[..., 0] + bias[0]
    assert (expected.abs() > 1).any()
    assert_near(wave, expected.clamp(-1, 1), 1e-5)


def poison(decoder: FusedDecoder) -> None:
    """Whatever a step reads and has not written shows."""
    for name, value in vars(decoder).items():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            for part in tensor if isinstance(tensor, list) else [tensor]:
                if isinstance(part, torch.Tensor) and part.is_floating_point():
                    part.fill_(float("nan"))
                    assert name != "inputs"


@needs_kernels
def test_the_decoder_equals_its_reference():
    """Rows of different length, phase and slot; a slot used twice; rows that fill a bucket up."""
    slots, dtype = 4, DTYPES[0]
    model = random_code2wav(SHAPE, DEVICE, slots)
    generator = torch.Generator(DEVICE).manual_seed(1)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():  # every parameter must count
            if name.endswith(("bias", "alpha", "beta", "scale", "gamma")):
                parameter.normal_(0, 0.3, generator=generator)
        model.prepare(slots)
    decoder = FusedDecoder(PackedCode2Wav(model, dtype, DEVICE), slots + 1, [Bucket(2, 4), Bucket(4, 8)])
    poison(decoder)
    runner = FusedRunner(decoder, cuda_graph=ON_GPU)
    random = np.random.default_rng(0)
    done = [0] * slots
    for calls in ([(2, 4), (0, 1)], [(2, 7), (3, 2), (0, 6)], [(2, 3), (3, 4)]):
        if calls[0] == (2, 3):
            done[2] = 0  # a new session
        chunks = [Row(slot, done[slot], random.integers(0, 11, (n, 3), dtype=np.int32)) for slot, n in calls]
        waves = runner.decode(chunks, lambda samples: samples)
        for row, wave in zip(chunks, waves, strict=True):
            n = len(row.codes)
            given = torch.from_numpy(row.codes)[None].to(DEVICE).long()
            with torch.inference_mode():
                expected = model(given, *(torch.tensor([i], device=DEVICE) for i in (n, row.position, row.slot)))[0]
            expected = expected[max(0, SHAPE.lookahead_samples - row.position * SHAPE.samples_per_frame) :].cpu()
            assert wave.shape == expected.shape
            assert decibels(expected, torch.from_numpy(wave)) > (90 if dtype == torch.float32 else 45)
            done[row.slot] += n
    assert done == [7, 0, 3, 6]
