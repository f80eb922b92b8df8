"""A talker of a checkpoint's shape without its weights: for measurements, and for tests of the arithmetic."""

from __future__ import annotations

import torch

from triton_omni.talker.layers import Rope
from triton_omni.talker.model import Talker
from triton_omni.talker.shape import TalkerShape

# Spreads that keep the residual stream in the range of a trained model's.
_EMBEDDING, _PROJECTION, _TEXT = 0.3, 0.03, 0.5


@torch.inference_mode()
def random_talker(shape: TalkerShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Talker:
    """Prepared and ready to run. Norms are 1, all else is normally distributed and drawn in float32 on ``device``."""
    with torch.device("meta"):
        talker = Talker(shape)
    talker.to(dtype).to_empty(device=device)
    talker.model.rope = Rope(shape.backbone).to(device)
    talker.code_predictor.model.rope = Rope(shape.predictor).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in talker.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.fill_(1)
        else:
            spread = _EMBEDDING if "embedding" in name else _PROJECTION
            parameter.normal_(0, spread, generator=generator)
    text = torch.empty(shape.thinker_vocab, shape.thinker_hidden, dtype=dtype, device=device)
    talker.prepare(text.normal_(0, _TEXT, generator=generator))
    return talker.eval()
