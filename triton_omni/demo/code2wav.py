"""The demo vocoder: a random network that hums at a comfortable level, without an offset and without clipping."""

from __future__ import annotations

from typing import Any

import torch

from triton_omni.demo.weights import generator

LOUDNESS_RMS = 0.1
CALIBRATION_FRAMES = 50
# Part of every kernel tap that all taps share: it damps the hiss that independent taps would make.
SMOOTHNESS = 0.4


def shape_code2wav(code2wav: Any, seed: int) -> None:
    """Smooth the kernels of a ``Qwen3OmniMoeCode2Wav`` of random weights and set the last convolution's level."""
    with torch.no_grad():
        for block in code2wav.decoder[1:-2]:
            _smooth(block.block[1].conv.weight)
        last = code2wav.decoder[-1].conv
        _smooth(last.weight)
        last.bias.zero_()
        last.weight.mul_(1e-4)  # far below the clamp at +-1, so that the level can be read off
        codes = torch.randint(
            code2wav.config.codebook_size,
            (1, code2wav.config.num_quantizers, CALIBRATION_FRAMES),
            generator=generator(seed, "calibration codes"),
        )
        wave = code2wav(codes)
        gain = _rounded(LOUDNESS_RMS / float(wave.std()))
        last.weight.mul_(gain)
        last.bias.fill_(_rounded(-gain * float(wave.mean())))


def _smooth(kernel: torch.Tensor) -> None:
    """[out, in, taps] (or [in, out, taps]) in place, keeping its size."""
    shared = kernel.mean(-1, keepdim=True) * kernel.shape[-1] ** 0.5
    kernel.copy_(SMOOTHNESS * shared + (1 - SMOOTHNESS**2) ** 0.5 * kernel)


def _rounded(value: float) -> float:
    """Three digits: the last bits of a sum depend on the machine, the checkpoint's bytes shall not."""
    return float(f"{value:.2e}")
