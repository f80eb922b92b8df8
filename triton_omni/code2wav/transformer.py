"""The pre-transformer of code2wav: sliding-window attention over codec frames, with the window kept per session.

Parameter names are the checkpoint's. Reference: Qwen3OmniMoeCode2WavTransformerModel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.code2wav.slots import History, Span


class RMSNorm(nn.Module):
    """Variance in float32, whatever the input's dtype (so in the reference, float64 included)."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Rotary(nn.Module):
    """Angles of the session's absolute frame numbers, in float32 whatever the model's dtype, as in the reference. Frame
    numbers are exact there up to 2^24 (15 days of speech).
    """

    inverse_frequencies: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self._head_dim = head_dim
        self._theta = theta

    def prepare(self, device: torch.device) -> None:
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        self.register_buffer("inverse_frequencies", (1.0 / self._theta**exponents).to(device), persistent=False)

    def forward(self, frames: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """frames int64 [B, T] -> cos, sin [B, 1, T, head_dim]."""
        half = frames[:, None, :, None].float() * self.inverse_frequencies
        angles = torch.cat([half, half], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention. x: [B, heads, T, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Grouped-query attention over the last ``window`` frames, own frame included."""

    def __init__(self, shape: Code2WavShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        inner, kv_inner, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(shape.hidden_size, inner, bias=bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_inner, bias=bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_inner, bias=bias)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=bias)
        self.keys = History(kv_inner, shape.window - 1, time_axis=1)
        self.values = History(kv_inner, shape.window - 1, time_axis=1)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor, span: Span) -> Tensor:
        """x [B, T, hidden]; visible bool [B, 1, T, window - 1 + T]."""
        q = rotate(self._heads(self.q_proj(x)), *rotary)
        k = rotate(self._heads(self.k_proj(x)), *rotary)  # kept rotated: angles are absolute
        k = self._heads(self.keys.extend(k.transpose(1, 2).flatten(2), span))
        v = self._heads(self.values.extend(self.v_proj(x), span))
        gqa = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=gqa)  # [B, heads, T, head_dim]
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class GatedMlp(nn.Module):
    def __init__(self, shape: Code2WavShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TransformerLayer(nn.Module):
    def __init__(self, shape: Code2WavShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = GatedMlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn_layer_scale = LayerScale(shape.hidden_size)
        self.mlp_layer_scale = LayerScale(shape.hidden_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor, span: Span) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotary, visible, span))
        out: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class PreTransformer(nn.Module):
    """[B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, shape: Code2WavShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta)
        self.window = shape.window

    def forward(self, x: Tensor, positions: Tensor, span: Span) -> Tensor:
        frames = torch.arange(x.shape[1], device=x.device)  # [T]
        rotary = self.rotary(positions[:, None] + frames, x.dtype)
        visible = self._visible(frames, positions)
        for layer in self.layers:
            x = layer(x, rotary, visible, span)
        out: Tensor = self.norm(x)
        return out

    def _visible(self, frames: Tensor, positions: Tensor) -> Tensor:
        """Key column j is frame ``positions - (window - 1) + j``: it must exist and lie in the query's window."""
        past = self.window - 1
        keys = torch.arange(past + len(frames), device=frames.device)  # [S]
        in_window = (keys >= frames[:, None]) & (keys <= frames[:, None] + past)  # [T, S]
        exists = keys >= past - positions[:, None]  # [B, S]
        return (in_window & exists[:, None]).unsqueeze(1)
