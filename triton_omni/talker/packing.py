"""A talker's weights as the kernels want them: stacked projections, shared expert cut up, rotary tables."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from triton_omni.talker.layers import MLP, DecoderLayer, Rope
from triton_omni.talker.model import SparseMoe, Talker


@dataclasses.dataclass(frozen=True, slots=True)
class DenseLayer:
    """A predictor layer. ``qkv`` [(heads + 2 kv_heads) * D, H]; ``out`` [H, heads * D]; ``gate_up`` [2 I, H]; ``down``
    [H, I]; the norms' gains."""

    norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class BackboneLayer:
    """A backbone layer. ``gate_up`` [E + S, 2 I, H] and ``down`` [E + S, H, I]: routed experts, then the pieces of the
    shared one; ``router`` [E + 1, H]: the shared expert's gate is its last row."""

    norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor


class PackedTalker:
    """Packs ``talker`` in place: its modules' parameters become views of the stacks, so that nothing is held twice but
    the shared experts. ``shared``: pieces of the shared expert.
    """

    @torch.inference_mode()
    def __init__(self, talker: Talker) -> None:
        shape = talker.shape
        self.shared = -(-shape.moe.shared_intermediate // shape.moe.intermediate)
        self.backbone = [self._mixture_layer(layer) for layer in talker.model.layers]
        self.predictor = [_dense_layer(layer) for layer in talker.code_predictor.model.layers]
        self.norm = talker.model.norm.weight
        self.codec_head = talker.codec_head.weight
        self.predictor_norm = talker.code_predictor.model.norm.weight
        self.heads = [head.weight for head in talker.code_predictor.lm_head if isinstance(head, nn.Linear)]
        embeddings = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
        # the last group's code is nobody's input: its embedding only serves as a harmless table to read from
        self.code_tables = [embedding.weight for embedding in embeddings]
        self.rotary = rotary_table(talker.model.rope, shape.max_positions)
        self.predictor_rotary = rotary_table(talker.code_predictor.model.rope, shape.groups + 1)

    def _mixture_layer(self, layer: nn.Module) -> BackboneLayer:
        assert isinstance(layer, DecoderLayer)
        mixture = layer.mlp
        assert isinstance(mixture, SparseMoe)
        experts, shared = mixture.experts, mixture.shared_expert
        width = experts.down_proj.shape[2]
        missing = self.shared * width - shared.gate_proj.weight.shape[0]
        gate, up = (nn.functional.pad(p.weight, (0, 0, 0, missing)) for p in (shared.gate_proj, shared.up_proj))
        down = nn.functional.pad(shared.down_proj.weight, (0, missing))
        pieces = torch.cat([gate.view(self.shared, width, -1), up.view(self.shared, width, -1)], dim=1)
        gate_up = torch.cat([experts.gate_up_proj, pieces])
        downs = torch.cat([experts.down_proj, down.view(-1, self.shared, width).transpose(0, 1)])
        experts.gate_up_proj = _view(gate_up[: len(experts.gate_up_proj)])
        experts.down_proj = _view(downs[: len(experts.down_proj)])
        return BackboneLayer(
            **_attention(layer),
            router=torch.cat([mixture.gate.weight, mixture.shared_expert_gate.weight]),
            gate_up=gate_up,
            down=downs,
        )


def _dense_layer(layer: nn.Module) -> DenseLayer:
    assert isinstance(layer, DecoderLayer)
    mlp = layer.mlp
    assert isinstance(mlp, MLP)
    return DenseLayer(**_attention(layer), gate_up=_stack([mlp.gate_proj, mlp.up_proj]), down=mlp.down_proj.weight)


def _attention(layer: DecoderLayer) -> dict[str, Tensor]:
    attention = layer.self_attn
    return {
        "norm": layer.input_layernorm.weight,
        "qkv": _stack([attention.q_proj, attention.k_proj, attention.v_proj]),
        "q_norm": attention.q_norm.weight,
        "k_norm": attention.k_norm.weight,
        "out": attention.o_proj.weight,
        "post_norm": layer.post_attention_layernorm.weight,
    }


def _stack(parts: list[nn.Linear]) -> Tensor:
    """Rows of all parts one below the other; the parts become views of it."""
    stacked = torch.cat([part.weight for part in parts])
    first = 0
    for part in parts:
        part.weight = _view(stacked[first : first + part.out_features])
        first += part.out_features
    return stacked


def _view(rows: Tensor) -> nn.Parameter:
    return nn.Parameter(rows, requires_grad=False)


def rotary_table(rope: Rope, positions: int) -> Tensor:
    """float32 [positions, D]: cosines of the D / 2 angles of each position, then sines."""
    device = rope.inverse_frequencies.device
    cos, sin = rope(torch.arange(positions, device=device)[None])  # [1, positions, D], both halves alike
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)
