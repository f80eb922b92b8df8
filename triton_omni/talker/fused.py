"""A talker step, and a piece of prefill, as fixed sequences of kernel launches without a read on the host: what CUDA
graphs capture.

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


# Prefill has many rows of each expert.
PREFILL_TILES = dataclasses.replace(TILES, expert_up=Tile(32, 32, 256, 4, 3), expert_down=Tile(32, 64, 64, 4, 4))

# float32 runs without tensor cores and has twice the bytes.
_PRECISE = Tile(16, 16, 32, 4, 2)
PRECISE_TILES = Tiles(*[_PRECISE] * 8)

# Rows of FusedStep.prompt_inputs.
PROMPT_INPUTS = 7


class FusedStep:
    """Static buffers for up to ``max_rows`` rows and the launches that work on them. Output of a step: ``frames`` int64
    [max_rows, groups]. ``overlap``: programmatic dependent launch, which needs compute capability 9.0.
    """

    def __init__(self, talker: Talker, state: Slots, max_rows: int, *, overlap: bool) -> None:
        self.talker, self.state, self.packed = talker, state, PackedTalker(talker)
        self.overlap = overlap
        shape = talker.shape
        backbone, predictor = shape.backbone, shape.predictor
        self._device, self._dtype = state.device, talker.codec_head.weight.dtype
        hidden = backbone.hidden
        self._inputs = self._zeros(max_rows * PROMPT_INPUTS, dtype=torch.long)
        self._rows = torch.arange(max_rows, device=state.device)
        self._axes = talker.model.rope.axis.repeat(2).to(state.device)  # [D]: cosines, then sines
        self._columns = torch.arange(backbone.head_dim, device=state.device)
        self.media = self._zeros(max_rows, hidden)
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
        self.groups = moe.Groups(
            order=self._zeros(max_rows * slots_per_row, dtype=torch.int32),
            starts=self._zeros(shape.moe.experts + self.packed.shared, dtype=torch.int32),
        )
        self.expert_act = self._zeros(max_rows * slots_per_row, shape.moe.intermediate)
        self.expert_out = self._zeros(max_rows * slots_per_row, hidden)
        self.act = self._zeros(max_rows, predictor.intermediate)
        widest = max(backbone.vocab, predictor.vocab, shape.moe.experts + 1)
        self.logits = self._zeros(max_rows, widest, dtype=torch.float32)
        self.frame_kv = self._zeros(predictor.layers, max_rows, 2, predictor.kv_heads, shape.groups, predictor.head_dim)
        self.every_slot = state.every()

    def _zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(size, dtype=dtype or self._dtype, device=self._device)

    def inputs(self, count: int) -> Tensor:
        """What ``step`` of ``count`` rows reads, int64 [2, count]: slots, text ids."""
        return self._inputs[: 2 * count].view(2, count)

    def prompt_inputs(self, count: int) -> Tensor:
        """What ``prefill`` of ``count`` rows reads besides ``media``, int64 [7, count]: slots, text ids (negative: the
        row of ``media``), layer-0 codec ids (negative: none), the row's number in its slot, M-RoPE positions (t, h, w).
        """
        return self._inputs[: PROMPT_INPUTS * count].view(PROMPT_INPUTS, count)

    def step(self, count: int, tiles: Tiles) -> None:
        """Launch one decode step of ``count`` rows."""
        talker, state, pdl = self.talker, self.state, self.overlap
        slots, text_ids = self.inputs(count)
        eps = talker.shape.backbone.norm_eps
        x = self._residual(count, 1)
        rows.embed_step(
            slots, text_ids, state.codes, talker.code_offsets, talker.codec_table, talker.text_table,
            self.packed.backbone[0].norm, x, pdl,
        )  # fmt: skip
        for number, layer in enumerate(self.packed.backbone):
            qkv = self._project(x, layer.qkv, eps, count, tiles)
            mixed = self._flat(self.mixed, count, layer.out.shape[1])
            attention.decode_attention(
                qkv, layer.q_norm, layer.k_norm, eps, self.packed.rotary, state.position, state.length, slots,
                state.kv[number], mixed, by_slot=True, pdl=pdl,
            )  # fmt: skip
            x = self._finish_layer(x, mixed, number, count, tiles)
        self._speak(x, slots, count, tiles)
        rows.finish_step(
            slots, self.frames[:count], state.codes, state.length, state.position, state.frame, state.spare, pdl
        )

    def prefill(self, count: int, tiles: Tiles) -> None:
        """Launch ``count`` rows of prompts, each behind the rows of its slot that are computed or come with it."""
        talker, state, pdl = self.talker, self.state, self.overlap
        given = self.prompt_inputs(count)
        slots, text_ids, codec_ids, index = given[:4]
        each = self._rows[:count]
        rotary = self.packed.rotary[given[4:].T[:, self._axes], self._columns].contiguous()  # [count, D]
        x = self._residual(count, 1)
        rows.embed_step(
            each, text_ids, codec_ids[:, None], talker.code_offsets, talker.codec_table, talker.text_table,
            self.packed.backbone[0].norm, x, pdl, other_rows=self.media,
        )  # fmt: skip
        eps = talker.shape.backbone.norm_eps
        for number, layer in enumerate(self.packed.backbone):
            qkv = self._project(x, layer.qkv, eps, count, tiles)
            cache = state.kv[number]
            attention.write_keys(qkv, layer.k_norm, eps, rotary, index, slots, cache, pdl)
            if number + 1 == len(self.packed.backbone):
                return  # nobody asks for what comes behind the last keys
            mixed = self._flat(self.mixed, count, layer.out.shape[1])
            attention.decode_attention(
                qkv, layer.q_norm, layer.k_norm, eps, rotary, each, index, slots, cache, mixed,
                by_slot=False, write=False, pdl=pdl,
            )  # fmt: skip
            x = self._finish_layer(x, mixed, number, count, tiles)

    def _residual(self, count: int, parts: int) -> Residual:
        """The one residual stream, with its squares in ``parts`` pieces."""
        squares = self.squares.view(-1)[: count * parts].view(count, parts)
        return Residual(self.hidden[:count], self.scaled[:count], squares)

    def _project(self, x: Residual, weight: Tensor, eps: float, count: int, tiles: Tiles) -> Tensor:
        """Queries, keys and values."""
        qkv = self._flat(self.qkv, count, weight.shape[0])
        linear.norm_linear(x, eps, weight, qkv, tiles.qkv, self.overlap)
        return qkv

    def _finish_layer(self, x: Residual, mixed: Tensor, number: int, count: int, tiles: Tiles) -> Residual:
        """What follows attention in a backbone layer: output projection and experts."""
        layer = self.packed.backbone[number]
        after = self._after(tiles.out, count)
        linear.residual_linear(mixed, layer.out, x.hidden, layer.post_norm, after, tiles.out, self.overlap)
        last = number + 1 == len(self.packed.backbone)
        next_gain = self.packed.norm if last else self.packed.backbone[number + 1].norm
        return self._mixture(layer, next_gain, count, tiles)

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
        groups = self.groups
        moe.group(ids, groups, pdl)
        up, down = tiles.expert_up, tiles.expert_down
        moe.expert_products(x.scaled, scales, ids, groups, layer.gate_up, act, gated=True, tile=up, pdl=pdl)
        moe.expert_products(act, None, ids, groups, layer.down, out, gated=False, tile=down, pdl=pdl)
        after = self._residual(count, 1)
        moe.combine(out, weights, x.hidden, next_gain, after, pdl)
        return after

    def _speak(self, x: Residual, slots: Tensor, count: int, tiles: Tiles) -> None:
        """Final norm, layer-0 code, and the code predictor's passes: one per token of the frame."""
        talker, packed, pdl = self.talker, self.packed, self.overlap
        shape = talker.shape
        one, gain = self._residual(count, 1), packed.predictor[0].norm
        rows.norm_rows(x, packed.norm, shape.backbone.norm_eps, self.normed[:count], gain, one, pdl)
        logits = self._flat(self.logits, count, shape.backbone.vocab)
        linear.linear(self.normed[:count], packed.codec_head, logits, tiles.head, pdl)
        self._predict(0, one, count, tiles, last=len(packed.predictor) - 1)
        self._pick_first(logits, slots, one)
        logits = self._flat(self.logits, count, shape.predictor.vocab)
        for group in range(1, shape.groups):
            state = self._predict(group, one, count, tiles)
            linear.norm_linear(state, shape.predictor.norm_eps, packed.heads[group - 1], logits, tiles.head, pdl)
            self._pick_residual(group, logits, slots, one)

    def _pick_first(self, logits: Tensor, slots: Tensor, x: Residual) -> None:
        """The layer-0 code, and its embedding into ``x``."""
        packed, frames, eos = self.packed, self.frames[: len(slots)], self.talker.shape.codec.eos
        sampling.sample_layer0(
            logits,
            slots,
            self.every_slot,
            eos,
            frames,
            packed.code_tables[0],
            packed.predictor[0].norm,
            x,
            self.overlap,
        )

    def _pick_residual(self, group: int, logits: Tensor, slots: Tensor, x: Residual) -> None:
        """The code of a residual group, and its embedding into ``x``."""
        packed, frames = self.packed, self.frames[: len(slots)]
        table, gain = packed.code_tables[group], packed.predictor[0].norm
        sampling.sample_residual(logits, slots, self.every_slot, group, frames, table, gain, x, self.overlap)

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
        eps = self.talker.shape.predictor.norm_eps
        qkv = self._project(x, layer.qkv, eps, count, tiles)
        mixed, rotary = self._flat(self.mixed, count, layer.out.shape[1]), self.packed.predictor_rotary
        attention.frame_attention(qkv, layer.q_norm, layer.k_norm, eps, rotary, token, cache, mixed, self.overlap)
