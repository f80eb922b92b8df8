"""A decoder of a checkpoint's shape without its weights: for measurements, and for tests of the arithmetic."""

from __future__ import annotations

import torch

from triton_omni.code2wav.layers import CausalConv
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.shape import Code2WavShape

_SPREAD = 0.02  # the reference's initializer_range
_LAYER_SCALE = 0.01
_WAVE_RMS = 0.1  # of full scale: loud speech, without clipping
_PROBE_FRAMES = 8


@torch.no_grad()
def random_code2wav(shape: Code2WavShape, device: torch.device, slots: int, seed: int = 0) -> StreamingCode2Wav:
    """Prepared, in float32, its last layer scaled so that random codes give a wave of RMS 0.1. Norms are 1, biases,
    alphas and betas 0 (as a new SnakeBeta has them), all else is normally distributed.
    """
    with torch.device("meta"):
        model = StreamingCode2Wav(shape)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("gamma", "scale")):
            parameter.fill_(_LAYER_SCALE)
        elif name.endswith(("bias", "alpha", "beta")):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, _SPREAD, generator=generator)
    model.prepare(slots)
    model.eval()
    codes = torch.randint(
        shape.codebook_size, (1, _PROBE_FRAMES, shape.code_groups), device=device, generator=generator
    )
    zero = torch.zeros(1, dtype=torch.long, device=device)
    last = model.decoder[-1]
    assert isinstance(last, CausalConv)
    last.conv.weight.mul_(1e-3)  # so that the probe does not clip
    wave = model(codes, zero + _PROBE_FRAMES, zero, zero)[:, shape.lookahead_samples :]
    last.conv.weight.mul_(_WAVE_RMS / wave.std())
    return model
