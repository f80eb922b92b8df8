"""Random weights of a size at which every part is felt, from the seed and the parameter's name alone."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

# (fragment of the name, gain): at gain 1 a matrix keeps the size of its input. The first match counts.
_GAINS = (
    ("mlp.gate.weight", 2.0),  # MoE router: clear choices
    ("shared_expert_gate", 2.0),
    ("experts.", 1.7),
    ("codec_head", 3.0),
    ("code_predictor.lm_head", 3.0),
    ("down_proj", 1.5),
    ("code2wav.pre_transformer.layers.", 1.4),
)
_UNIFORM = (
    ("_norm.weight", 1.2, 1.8),  # of queries and keys: attention that looks at few positions
    ("norm.weight", 0.7, 1.3),
    ("ln_post.weight", 0.7, 1.3),
    ("ln_q.weight", 0.7, 1.3),
    ("norm1.weight", 0.7, 1.3),
    ("norm2.weight", 0.7, 1.3),
    ("gamma", 0.3, 0.6),
    ("layer_scale.scale", 0.4, 0.8),
    (".alpha", -0.4, 0.4),
    (".beta", -0.4, 0.4),
)


def generator(seed: int, name: str) -> torch.Generator:
    """A stream of its own for each name, so that one part's sizes never change another part's weights."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def normal(seed: int, name: str, *shape: int, std: float = 1.0) -> Tensor:
    """float32 of ``shape``, N(0, std)."""
    return torch.empty(shape).normal_(0, std, generator=generator(seed, name))


def fill(model: nn.Module, seed: int) -> None:
    """Draw every parameter of ``model`` in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(name, parameter.shape, seed))


def _drawn(name: str, shape: torch.Size, seed: int) -> Tensor:
    for fragment, low, high in _UNIFORM:
        if fragment in name:
            return torch.empty(shape).uniform_(low, high, generator=generator(seed, name))
    if len(shape) == 1:
        return normal(seed, name, *shape, std=0.1)
    if "embed" in name and len(shape) == 2:
        return normal(seed, name, *shape)
    gain = next((gain for fragment, gain in _GAINS if fragment in name), 1.0)
    stacked = "experts." in name and len(shape) == 3
    fan_in = shape[-1] if stacked else math.prod(shape[1:])
    return normal(seed, name, *shape, std=gain / math.sqrt(fan_in))
