"""One talker step as a fixed sequence of kernel launches, without a read on the host: what a CUDA graph captures.

The same computation as ``TalkerRunner`` (its reference), on packed copies of the same weights. Where precision is free
it is kept: the residual stream, norms, router and logits are float32.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from triton_omni.talker.kernels import attention, linear, moe, rows, sampling
from triton_omni.talker.kernels.linear import Residual, Tile
from triton_omni.talker.model import Talker
from triton_omni.talker.packing import BackboneLayer, DenseLayer, PackedTalker
from triton_omni.talker.slots import Slots

EXPERT_UP = Tile(16, 32, 256, 4, 3)
EXPERT_DOWN = Tile(16, 64, 64, 4, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Program shapes of one batch bucket. With the same tiles everywhere, a row's bits do not depend on the bucket."""

    qkv: Tile
    out: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    router: Tile
    expert_up: Tile = EXPERT_UP
    expert_down: Tile = EXPERT_DOWN


# Measured best on an H200 from 1 to 64 rows (docs/performance/talker.md): 64 rows a program even where most are empty,
# because only that shape runs on Hopper's asynchronous tensor cores. One set for every bucket keeps a row's bits equal.
TILES = Tiles(
    qkv=Tile(64, 32, 256, 4, 3),
    out=Tile(64, 16, 256, 4, 3),
    gate_up=Tile(64, 32, 128, 4, 4),
    down=Tile(64, 16, 256, 4, 3),
    head=Tile(64, 16, 256, 4, 3),
    router=Tile(64, 16, 256, 4, 3),
)


class FusedStep:
    """Static buffers for up to ``max_rows`` rows and the launches that work on them.

    Inputs ``slots`` and ``text_ids`` int64 [max_rows]; output ``frames`` int64 [max_rows, groups].
    """

    def __init__(self, talker: Talker, state: Slots, max_rows: int, *, overlap: bool = True) -> None:
        self.talker, self.state, self.packed = talker, state, PackedTalker(talker)
        self.overlap = overlap
        shape = talker.shape
        backbone, predictor = shape.backbone, shape.predictor
        self._device, self._dtype = state.device, talker.codec_head.weight.dtype
        hidden = backbone.hidden
        self.slots = self._zeros(max_rows, dtype=torch.long)
        self.text_ids = self._zeros(max_rows, dtype=torch.long)
        self.frames = self._zeros(max_rows, shape.groups, dtype=torch.long)
        self.hidden = self._zeros(max_rows, hidden, dtype=torch.float32)
        self.scaled = self._zeros(max_rows, hidden)
        self.squares = self._zeros(max_rows, hidden, dtype=torch.float32)
        widest = max((s.heads + 2 * s.kv_heads) * s.head_dim for s in (backbone, predictor))
        self.qkv = self._zeros(max_rows, widest)
        self.mixed = self._zeros(max_rows, max(s.heads * s.head_dim for s in (backbone, predictor)))
        self.normed = self._zeros(max_rows, hidden)
        self.scales = self._zeros(max_rows, dtype=torch.float32)
        slots_per_row = shape.moe.experts_per_token + self.packed.shared
        self.expert_ids = self._zeros(max_rows, slots_per_row, dtype=torch.int32)
        self.expert_weights = self._zeros(max_rows, slots_per_row, dtype=torch.float32)
        self.expert_act = self._zeros(max_rows * slots_per_row, shape.moe.intermediate)
        self.expert_out = self._zeros(max_rows * slots_per_row, hidden)
        self.act = self._zeros(max_rows, predictor.intermediate)
        self.logits = self._zeros(max_rows, max(backbone.vocab, predictor.vocab), dtype=torch.float32)
        self.frame_kv = self._zeros(predictor.layers, max_rows, 2, predictor.kv_heads, shape.groups, predictor.head_dim)
        self.every_slot = state.every()

    def _zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(size, dtype=dtype or self._dtype, device=self._device)

    def step(self, count: int, tiles: Tiles) -> None:
        """Launch one decode step of ``count`` rows."""
        talker, state, pdl = self.talker, self.state, self.overlap
        x = self._residual(count, 1)
        rows.embed_step(
            self.slots[:count], self.text_ids[:count], state.codes, talker.code_offsets, talker.codec_table,
            talker.text_table, self.packed.backbone[0].norm, x, pdl,
        )  # fmt: skip
        gains = [*(layer.norm for layer in self.packed.backbone[1:]), self.packed.norm]
        for number, layer in enumerate(self.packed.backbone):
            self._attend(x, layer, state.kv[number], count, tiles)
            x = self._mixture(layer, gains[number], count, tiles)
        self._speak(x, count, tiles)
        rows.finish_step(
            self.slots[:count], self.frames[:count], state.codes, state.length, state.position, state.frame,
            state.spare, pdl,
        )  # fmt: skip

    def _residual(self, count: int, parts: int) -> Residual:
        """The one residual stream, with its squares in ``parts`` pieces."""
        squares = self.squares.view(-1)[: count * parts].view(count, parts)
        return Residual(self.hidden[:count], self.scaled[:count], squares)

    def _attend(self, x: Residual, layer: BackboneLayer, cache: Tensor, count: int, tiles: Tiles) -> None:
        """Backbone attention on each row's slot; leaves the residual stream in ``_after(tiles.out)``."""
        shape, pdl = self.talker.shape.backbone, self.overlap
        qkv, mixed = self._flat(self.qkv, count, layer.qkv.shape[0]), self._flat(self.mixed, count, layer.out.shape[1])
        linear.norm_linear(x, shape.norm_eps, layer.qkv, qkv, tiles.qkv, pdl)
        attention.decode_attention(
            qkv, layer.q_norm, layer.k_norm, shape.norm_eps, self.packed.rotary, self.state.position,
            self.state.length, self.slots[:count], cache, mixed, by_slot=True, pdl=pdl,
        )  # fmt: skip
        after = self._after(tiles.out, count)
        linear.residual_linear(mixed, layer.out, x.hidden, layer.post_norm, after, tiles.out, pdl)

    def _after(self, tile: Tile, count: int) -> Residual:
        return self._residual(count, -(-self.hidden.shape[1] // tile.block_n))

    @staticmethod
    def _flat(buffer: Tensor, count: int, width: int) -> Tensor:
        return buffer.view(-1)[: count * width].view(count, width)

    def _mixture(self, layer: BackboneLayer, next_gain: Tensor, count: int, tiles: Tiles) -> Residual:
        shape, pdl = self.talker.shape, self.overlap
        slots = self.expert_ids.shape[1]
        ids, weights, scales = self.expert_ids[:count], self.expert_weights[:count], self.scales[:count]
        act, out = self.expert_act[: count * slots], self.expert_out[: count * slots]
        x = self._after(tiles.out, count)
        logits = self._flat(self.logits, count, layer.router.shape[0])
        moe.route(
            x, shape.backbone.norm_eps, layer.router, self.packed.shared, shape.moe.experts_per_token,
            shape.moe.normalise_weights, logits, scales, ids, weights, tiles.router, pdl,
        )  # fmt: skip
        moe.expert_products(x.scaled, scales, ids, layer.gate_up, act, gated=True, tile=tiles.expert_up, pdl=pdl)
        moe.expert_products(act, None, ids, layer.down, out, gated=False, tile=tiles.expert_down, pdl=pdl)
        after = self._residual(count, 1)
        moe.combine(out, weights, x.hidden, next_gain, after, pdl)
        return after

    def _speak(self, x: Residual, count: int, tiles: Tiles) -> None:
        """Final norm, layer-0 code, and the code predictor's passes: one per token of the frame."""
        talker, packed, pdl = self.talker, self.packed, self.overlap
        shape, slots, frames = talker.shape, self.slots[:count], self.frames[:count]
        one, gain = self._residual(count, 1), packed.predictor[0].norm
        rows.norm_rows(x, packed.norm, shape.backbone.norm_eps, self.normed[:count], gain, one, pdl)
        logits = self._flat(self.logits, count, shape.backbone.vocab)
        linear.linear(self.normed[:count], packed.codec_head, logits, tiles.head, pdl)
        self._predict(0, one, count, tiles, last=len(packed.predictor) - 1)
        sampling.sample_layer0(
            logits, slots, self.every_slot, shape.codec.eos, frames, packed.code_tables[0], gain, one, pdl
        )
        logits = self._flat(self.logits, count, shape.predictor.vocab)
        for group in range(1, shape.groups):
            state = self._predict(group, one, count, tiles)
            head = packed.heads[group - 1]
            linear.norm_linear(state, shape.predictor.norm_eps, head, logits, tiles.head, pdl)
            sampling.sample_residual(
                logits, slots, self.every_slot, group, frames, packed.code_tables[group], gain, one, pdl
            )

    def _predict(self, token: int, x: Residual, count: int, tiles: Tiles, last: int | None = None) -> Residual:
        """Token ``token`` of the frame through the predictor. ``last``: stop once that layer has its keys."""
        shape, pdl = self.talker.shape.predictor, self.overlap
        gains = [*(layer.norm for layer in self.packed.predictor[1:]), self.packed.predictor_norm]
        for number, layer in enumerate(self.packed.predictor):
            self._attend_frame(token, x, layer, self.frame_kv[number], count, tiles)
            if number == last:
                return x
            act = self._flat(self.act, count, shape.intermediate)
            mixed = self._flat(self.mixed, count, layer.out.shape[1])
            after = self._after(tiles.out, count)
            linear.residual_linear(mixed, layer.out, x.hidden, layer.post_norm, after, tiles.out, pdl)
            linear.norm_swiglu(after, shape.norm_eps, layer.gate_up, act, tiles.gate_up, pdl)
            x = self._after(tiles.down, count)
            linear.residual_linear(act, layer.down, x.hidden, gains[number], x, tiles.down, pdl)
        return x

    def _attend_frame(
        self, token: int, x: Residual, layer: DenseLayer, cache: Tensor, count: int, tiles: Tiles
    ) -> None:
        shape, pdl = self.talker.shape.predictor, self.overlap
        qkv, mixed = self._flat(self.qkv, count, layer.qkv.shape[0]), self._flat(self.mixed, count, layer.out.shape[1])
        linear.norm_linear(x, shape.norm_eps, layer.qkv, qkv, tiles.qkv, pdl)
        attention.frame_attention(
            qkv, layer.q_norm, layer.k_norm, shape.norm_eps, self.packed.predictor_rotary, token, cache, mixed, pdl
        )
