"""What the backbone and the code predictor are made of. Parameter names are the checkpoint's.

Norm variance, rotary embedding and router softmax are computed in float32 whatever the weights' dtype: their bfloat16
variants audibly degrade long speech.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_omni.talker.shape import DecoderShape


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # its sums are float32 for every dtype


class Rope(nn.Module):
    """Rotary angles. ``mrope_section`` (t, h, w): of each three neighbouring rotary pairs the second follows the height
    and the third the width, as far as their sections reach (Qwen's interleaved M-RoPE); the others follow the time.
    """

    inverse_frequencies: Tensor
    axis: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        pairs = shape.head_dim // 2
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu") / shape.head_dim
        axis = torch.zeros(pairs, dtype=torch.long, device="cpu")
        if shape.mrope_section is not None:
            for dim in (1, 2):
                axis[dim : shape.mrope_section[dim] * 3 : 3] = dim
        self.register_buffer("inverse_frequencies", 1.0 / (shape.rope_theta**exponents), persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [B, T, head_dim], for ``positions`` [B, T] or, by axis (t, h, w), [3, B, T]."""
        if positions.dim() == 3:
            angles = positions[self.axis].movedim(0, -1).float() * self.inverse_frequencies  # [B, T, pairs]
        else:
            angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [B, T, heads, head_dim] turned by the angles of ``Rope``, in float32."""
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x32 * cos[:, :, None] + turned * sin[:, :, None]).to(x.dtype)


class KVCache(Protocol):
    """Keys and values of the tokens so far."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values [B, T, kv_heads, head_dim]; give all [B, kv_heads, L, head_dim] and which of them each
        new token sees, bool [B, 1, T, L] (None: all).
        """


class Attention(nn.Module):
    """Grouped-query attention with RMS-normed queries and keys."""

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, shape.heads, shape.kv_heads, shape.head_dim
        width, bias = shape.heads * shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(shape.hidden, width, bias=bias)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden, bias=bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        batch, tokens, _ = x.shape
        queries = self.q_norm(self.q_proj(x).view(batch, tokens, self.heads, self.head_dim))
        keys = self.k_norm(self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim))
        values = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim)
        keys, values, visible = cache.extend(self.layer, rotate(keys, *rope), values)
        mixed = F.scaled_dot_product_attention(
            rotate(queries, *rope).transpose(1, 2), keys, values, attn_mask=visible, enable_gqa=True
        )  # [B, heads, T, head_dim]
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: DecoderShape, layer: int, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = mlp
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class ResizeMLP(nn.Module):
    """Projects thinker rows [..., thinker hidden] to talker rows [..., hidden]."""

    def __init__(self, thinker_hidden: int, intermediate: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(thinker_hidden, intermediate)
        self.linear_fc2 = nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return out
