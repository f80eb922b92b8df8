"""The code predictor: from a hidden state and a layer-0 code to the residual codes of the same frame.

Reference: transformers' Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from triton_omni.talker.layers import MLP, DecoderLayer, KVCache, RMSNorm, Rope
from triton_omni.talker.shape import DecoderShape

PickCode = Callable[[Tensor, int], Tensor]


class FrameCache:
    """Keys and values of one frame's predictor tokens: the hidden state, then each code but the last."""

    def __init__(self, shape: DecoderShape, batch: int, tokens: int, like: Tensor) -> None:
        size = (shape.layers, 2, batch, shape.kv_heads, tokens, shape.head_dim)
        self.kv = torch.empty(size, dtype=like.dtype, device=like.device)
        self.length = 0
        self.causal = torch.ones(2, 2, dtype=torch.bool, device=like.device).tril()[None, None]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens = keys.shape[1]
        end = self.length + tokens
        self.kv[layer, 0, :, :, self.length : end] = keys.transpose(1, 2)
        self.kv[layer, 1, :, :, self.length : end] = values.transpose(1, 2)
        return self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end], self.causal if tokens == 2 else None


class PredictorBackbone(nn.Module):
    """A dense decoder. ``codec_embedding[i]`` embeds the code of group i + 1."""

    def __init__(self, shape: DecoderShape, groups: int) -> None:
        super().__init__()
        self.codec_embedding = nn.ModuleList(nn.Embedding(shape.vocab, shape.hidden) for _ in range(groups - 1))
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer, MLP(shape.hidden, shape.intermediate)) for layer in range(shape.layers)
        )
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.rope = Rope(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        for layer in self.layers:
            x = layer(x, rope, cache)
        normed: Tensor = self.norm(x)
        return normed


class CodePredictor(nn.Module):
    """``lm_head[i]`` gives the logits of group i + 1."""

    def __init__(self, shape: DecoderShape, groups: int) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.model = PredictorBackbone(shape, groups)
        self.lm_head = nn.ModuleList(nn.Linear(shape.hidden, shape.vocab, bias=False) for _ in range(groups - 1))

    def forward(self, hidden: Tensor, first: Tensor, pick: PickCode) -> Tensor:
        """Residual codes int64 [B, groups - 1].

        ``hidden`` [B, hidden]: the backbone's state after its final norm, from which the layer-0 code was sampled;
        ``first`` [B, hidden]: that code's embedding; ``pick(logits [B, vocab], group)`` gives the code of a group.
        """
        batch = hidden.shape[0]
        cache = FrameCache(self.shape, batch, self.groups, like=hidden)
        cos, sin = self.model.rope(torch.arange(self.groups, device=hidden.device)[None])  # [1, groups, head_dim]
        x = torch.stack((hidden, first), dim=1)
        codes: list[Tensor] = []
        for group in range(1, self.groups):
            span = slice(cache.length, cache.length + x.shape[1])
            state = self.model(x, (cos[:, span], sin[:, span]), cache)[:, -1]
            cache.length = span.stop
            code = pick(self.lm_head[group - 1](state), group)
            codes.append(code)
            if group < self.groups - 1:
                x = self.model.codec_embedding[group - 1](code)[:, None]
        return torch.stack(codes, dim=1)
