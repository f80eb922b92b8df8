"""How near half precision comes to float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triton_omni.code2wav.buckets import Bucket
from triton_omni.code2wav.fused import FusedDecoder, Inputs
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.packing import PackedCode2Wav

_FRAMES = 8


@torch.inference_mode()
def signal_to_noise_db(model: StreamingCode2Wav, packed: PackedCode2Wav) -> float:
    """Of the fused decoder's wave against ``model``'s, in float32 without TF32, on random codes. Uses slot 0."""
    shape, bucket = model.shape, Bucket(1, _FRAMES)
    decoder = FusedDecoder(packed, slots=2, buckets=[bucket])
    generator = torch.Generator(packed.device).manual_seed(0)
    codes = torch.randint(
        shape.codebook_size, (1, _FRAMES, shape.code_groups), device=packed.device, generator=generator
    )
    given = Inputs.of(decoder.inputs, bucket, shape.code_groups)
    given.codes.copy_(codes)
    given.lengths.fill_(_FRAMES)
    decoder.step(bucket)
    zero = torch.zeros(1, dtype=torch.long, device=packed.device)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        exact = model(codes, zero + _FRAMES, zero, zero)
    lost = shape.lookahead_samples
    return decibels(exact[0, lost:], decoder.wave[lost : exact.numel()])


def decibels(exact: Tensor, wave: Tensor) -> float:
    """10 log10 of the signal's energy over the difference's."""
    noise = (wave - exact).double().square().sum().item()
    return 10 * math.log10(exact.double().square().sum().item() / noise) if noise else math.inf
