"""The talker's network: a mixture-of-experts decoder over codec frames, and the projections into it.

Reference: transformers' Qwen3OmniMoeTalkerForConditionalGeneration, without its generation loop.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_omni.talker.layers import MLP, DecoderLayer, KVCache, ResizeMLP, RMSNorm, Rope
from triton_omni.talker.predictor import CodePredictor
from triton_omni.talker.shape import MoeShape, TalkerShape


class Router(nn.Module):
    """Which experts each token takes, and with what weight."""

    def __init__(self, shape: MoeShape, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, hidden))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Weights [N, experts] of ``x`` [N, hidden]; 0 for the experts not taken."""
        probabilities = torch.softmax(F.linear(x, self.weight), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.shape.experts_per_token, dim=-1)
        if self.shape.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, experts, weights).to(x.dtype)


class Experts(nn.Module):
    """All experts' SwiGLU weights, stacked."""

    def __init__(self, shape: MoeShape, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, hidden, shape.intermediate))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum of the experts' outputs for ``x`` [N, hidden] by ``weights`` [N, experts].

        Every expert computes every token: shapes depend on N alone, so the step can be captured, and a row's sum
        always runs in the experts' order, so it does not depend on its neighbours.
        """
        gate, up = torch.matmul(x, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)  # [E, N, intermediate]
        out = torch.matmul(F.silu(gate) * up, self.down_proj.transpose(1, 2))  # [E, N, hidden]
        return (out * weights.T[..., None]).sum(dim=0)


class SparseMoe(nn.Module):
    """Routed experts plus a shared one behind a sigmoid gate."""

    def __init__(self, shape: MoeShape, hidden: int) -> None:
        super().__init__()
        self.gate = Router(shape, hidden)
        self.experts = Experts(shape, hidden)
        self.shared_expert = MLP(hidden, shape.shared_intermediate)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # [N, hidden]
        shared: Tensor = torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        routed: Tensor = self.experts(rows, self.gate(rows))
        return (routed + shared).view_as(x)


class Backbone(nn.Module):
    """The MoE decoder. ``codec_embedding`` embeds layer-0 codes, control codes and speakers."""

    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        decoder = shape.backbone
        self.codec_embedding = nn.Embedding(decoder.vocab, decoder.hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(decoder, layer, SparseMoe(shape.moe, decoder.hidden)) for layer in range(decoder.layers)
        )
        self.norm = RMSNorm(decoder.hidden, decoder.norm_eps)
        self.rope = Rope(decoder)

    def forward(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Hidden states [B, T, hidden] after the final norm, of ``x`` [B, T, hidden] at ``positions`` (see Rope)."""
        rope = self.rope(positions)
        for layer in self.layers:
            x = layer(x, rope, cache)
        normed: Tensor = self.norm(x)
        return normed


class Talker(nn.Module):
    """Everything below ``talker.`` in a checkpoint. Call ``prepare`` once the weights are loaded."""

    codec_table: Tensor
    code_offsets: Tensor
    text_table: Tensor

    def __init__(self, shape: TalkerShape) -> None:
        super().__init__()
        hidden = shape.backbone.hidden
        self.shape = shape
        self.model = Backbone(shape)
        self.codec_head = nn.Linear(hidden, shape.backbone.vocab, bias=False)
        self.text_projection = ResizeMLP(shape.thinker_hidden, shape.projection_intermediate, hidden)
        self.hidden_projection = ResizeMLP(shape.thinker_hidden, shape.projection_intermediate, hidden)
        self.code_predictor = CodePredictor(shape.predictor, shape.groups)

    @torch.inference_mode()
    def prepare(self, embed_tokens: Tensor, chunk: int = 4096) -> None:
        """Derive the tables of the decode step. ``embed_tokens`` [text vocabulary, thinker hidden]: the thinker's.

        ``text_table`` [text vocabulary, hidden]: every text token as the talker hears it, so that a token's id is all
        the thinker has to send. ``codec_table``: the embeddings of all code groups one below the other;
        ``code_offsets`` [groups] leads into it.
        """
        device, dtype = self.codec_head.weight.device, self.codec_head.weight.dtype
        pieces = [self.text_projection(piece.to(device, dtype)) for piece in torch.split(embed_tokens, chunk)]
        self.register_buffer("text_table", torch.cat(pieces), persistent=False)
        embeddings = [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]
        sizes = [len(embedding.weight) for embedding in embeddings]
        offsets = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)
        table = torch.cat([embedding.weight for embedding in embeddings])
        self.register_buffer("code_offsets", offsets, persistent=False)
        self.register_buffer("codec_table", table, persistent=False)
        for embedding, rows in zip(embeddings, torch.split(table, sizes), strict=True):
            embedding.weight = nn.Parameter(rows, requires_grad=False)  # a view: one copy in memory

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Sum of the embeddings of all groups, [B, hidden], for ``codes`` int64 [B, groups], negative: none."""
        found = self.codec_table[codes.clamp(min=0) + self.code_offsets]  # [B, groups, hidden]
        return found.masked_fill((codes < 0)[..., None], 0).sum(dim=1)
