"""The streaming code2wav decoder: codec frames in, exactly the samples that became final out."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from triton_omni.code2wav.layers import KERNEL_SIZE, CausalConv, DecoderBlock, SnakeBeta, UpsampleBlock
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.code2wav.slots import History, Span
from triton_omni.code2wav.transformer import PreTransformer, Rotary


class StreamingCode2Wav(nn.Module):
    """Qwen3OmniMoeCode2Wav with the state of its sessions in ``slots`` fixed places.

    After n frames of a session the first ``n * shape.samples_per_frame - shape.lookahead_samples`` samples of its wave
    are final and have been returned; together they equal one pass of the reference over the n frames, however they were
    cut. May be built on ``meta``; ``prepare`` follows once the parameters are in place.
    """

    group_starts: Tensor

    def __init__(self, shape: Code2WavShape) -> None:
        super().__init__()
        self.shape = shape
        self.code_embedding = nn.Embedding(shape.codebook_size * shape.code_groups, shape.hidden_size)
        self.pre_transformer = PreTransformer(shape)
        self.upsample = nn.ModuleList(UpsampleBlock(shape.hidden_size, ratio) for ratio in shape.upsampling_ratios)
        widths = [shape.decoder_dim // 2**i for i in range(len(shape.upsample_rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv(shape.hidden_size, widths[0], KERNEL_SIZE),
                *(DecoderBlock(widths[i], widths[i + 1], rate) for i, rate in enumerate(shape.upsample_rates)),
                SnakeBeta(widths[-1]),
                CausalConv(widths[-1], 1, KERNEL_SIZE),
            ]
        )

    def prepare(self, slots: int) -> None:
        """Allocate the slots' state, and compute once what depends on the parameters alone; both where they are."""
        self.requires_grad_(False)
        weight = self.code_embedding.weight
        group_starts = torch.arange(self.shape.code_groups, device=weight.device) * self.shape.codebook_size
        self.register_buffer("group_starts", group_starts, persistent=False)
        for module in self.modules():
            if isinstance(module, SnakeBeta):
                module.prepare()
            elif isinstance(module, Rotary):
                module.prepare(weight.device)
            elif isinstance(module, History):
                module.prepare(slots, weight)

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot's state."""
        return sum(module.stored[0].nbytes for module in self.modules() if isinstance(module, History))

    def forward(self, codes: Tensor, lengths: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """One step of B different sessions. Reads no tensor on the host and has fixed shapes, for graph capture.

        codes int64 [B, T, code_groups], right-padded with any valid code; lengths int64 [B] in 0..T, frames that
        count; positions int64 [B], frames of the session before this step (0 starts afresh in the slot); slots
        int64 [B], all different.
        Returns [B, T * samples_per_frame] in [-1, 1]; column i of row b is sample
        ``positions[b] * samples_per_frame - lookahead_samples + i`` and counts if that is >= 0 and
        ``i < lengths[b] * samples_per_frame``.
        """
        spans = [Span(level.rate, level.lag, slots, positions, lengths) for level in self.shape.levels]
        x = self.code_embedding(codes + self.group_starts).mean(2)  # [B, T, hidden]
        x = self.pre_transformer(x, positions, spans[0]).transpose(1, 2)  # [B, hidden, T]
        for block, above in zip(self.upsample, spans[1:], strict=False):
            x = block(x, above)
        spans = spans[len(self.upsample) :]
        first, *blocks, last_act, last = self.decoder
        x = first(x, spans[0])
        for block, (below, above) in zip(blocks, itertools.pairwise(spans), strict=True):
            x = block(x, below, above)
        wave: Tensor = last(last_act(x), spans[-1])  # [B, 1, T * samples_per_frame]
        return wave.squeeze(1).clamp(-1, 1)
