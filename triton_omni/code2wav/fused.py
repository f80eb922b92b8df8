"""One code2wav step as a fixed sequence of kernel launches, without a read on the host: what a CUDA graph captures.

The same computation as ``StreamingCode2Wav`` (its reference), on packed copies of the same weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from triton_omni.code2wav import tiles
from triton_omni.code2wav.buckets import Bucket
from triton_omni.code2wav.kernels import attention, conv, history, rows
from triton_omni.code2wav.kernels.conv import Columns, Conv, Snake
from triton_omni.code2wav.packing import AttentionLayer, PackedCode2Wav, Upsample
from triton_omni.code2wav.shape import Level


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """One bucket's inputs, int32: slots, positions and lengths [rows], codes [rows, frames, groups]; all of them views
    of ``everything``, in this order."""

    everything: Tensor
    slots: Tensor
    positions: Tensor
    lengths: Tensor
    codes: Tensor

    @classmethod
    def of(cls, storage: Tensor, bucket: Bucket, groups: int) -> Inputs:
        """Views of ``storage``'s beginning."""
        n = bucket.rows
        everything = storage[: n * 3 + bucket.size * groups]
        slots, positions, lengths = everything[: n * 3].view(3, n)
        return cls(everything, slots, positions, lengths, everything[n * 3 :].view(n, bucket.frames, groups))


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of the static buffers, in elements: ``stream`` float32, ``columns`` each of two in the weights' dtype,
    ``tokens``: most frames of a step, ``inputs`` int32."""

    stream: int
    columns: int
    tokens: int
    inputs: int

    @classmethod
    def of(cls, packed: PackedCode2Wav, buckets: Sequence[Bucket]) -> Extent:
        """What the largest of ``buckets`` needs at the widest place."""
        shape = packed.shape
        hidden = shape.hidden_size
        attention_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        widths = [(1, max(attention_width, shape.intermediate_size, hidden), 0)]  # columns per frame, channels, head
        upsampled = 1
        for upsample in packed.upsamples:
            upsampled *= upsample.repeat.samples
            widths.append((upsampled, upsample.widen.outputs, len(upsample.taps) - 1))
        widths.append((upsampled, hidden, packed.first.head))
        levels = shape.levels[len(packed.upsamples) :]
        widths.append((levels[0].rate, packed.first.channels_out, 1))
        for block, level in zip(packed.blocks, levels[1:], strict=True):
            head = max(*(unit.conv1.head for unit in block.units), packed.last.head)
            widths.append((level.rate, block.transposed.channels_out, head))
        columns = max(
            (bucket.rows * head + bucket.size * rate) * channels
            for bucket in buckets
            for rate, channels, head in widths
        )
        tokens = max(bucket.size for bucket in buckets)
        stream = tokens * max(rate * channels for rate, channels, _ in widths)
        inputs = max(bucket.rows * 3 + bucket.size * shape.code_groups for bucket in buckets)
        return cls(stream, columns, tokens, inputs)


class FusedDecoder:
    """State of ``slots`` sessions and static buffers for the largest of ``buckets``; ``step`` launches on them.

    The last slot is the spare one: its state means nothing, any number of rows may work on it.
    Output of a step: ``wave`` float32, [rows, frames * samples_per_frame] from its beginning.
    """

    def __init__(self, packed: PackedCode2Wav, slots: int, buckets: Sequence[Bucket]) -> None:
        self.packed, self.shape, self.buckets = packed, packed.shape, list(buckets)
        self.spare = slots - 1
        shape, extent = packed.shape, Extent.of(packed, buckets)
        self._stream = self._zeros(extent.stream, dtype=torch.float32)
        self._columns = (self._zeros(extent.columns), self._zeros(extent.columns))
        self._rotary = self._zeros(extent.tokens * shape.head_dim, dtype=torch.float32)
        self.inputs = self._zeros(extent.inputs, dtype=torch.int32)
        self.wave = self._zeros(extent.tokens * shape.samples_per_frame, dtype=torch.float32)
        ring = (slots, shape.window, shape.kv_heads, shape.head_dim)
        self._keys = [self._zeros(*ring) for _ in packed.attention]
        self._values = [self._zeros(*ring) for _ in packed.attention]
        self._taps_past = [self._zeros(slots, len(b.taps) - 1, shape.hidden_size) for b in packed.upsamples]
        self._first_past = self._past(slots, packed.first)
        self._last_past = self._past(slots, packed.last)
        self._transposed_past = [self._past(slots, block.transposed) for block in packed.blocks]
        self._units_past = [[self._past(slots, unit.conv1) for unit in block.units] for block in packed.blocks]

    def _zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(size, dtype=dtype or self.packed.dtype, device=self.packed.device)

    def _past(self, slots: int, layer: Conv) -> Tensor:
        return self._zeros(slots, layer.head, layer.channels_in)

    @property
    def state_bytes(self) -> int:
        """Memory of all slots."""
        units = [past for block in self._units_past for past in block]
        past = [self._first_past, self._last_past, *self._taps_past, *self._transposed_past, *units]
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values, *past))

    @property
    def work_bytes(self) -> int:
        """Memory of the static buffers."""
        buffers = (self._stream, *self._columns, self._rotary, self.inputs, self.wave)
        return sum(tensor.nbytes for tensor in buffers)

    def step(self, bucket: Bucket) -> None:
        """Launch one step of ``bucket`` on the inputs that stand in ``inputs``."""
        _Step(self, bucket).run()


class _Step:
    """The launches of one bucket. What the next convolution reads alternates between two buffers."""

    def __init__(self, decoder: FusedDecoder, bucket: Bucket) -> None:
        self._decoder, self._packed, self._bucket = decoder, decoder.packed, bucket
        self._inputs = Inputs.of(decoder.inputs, bucket, decoder.shape.code_groups)
        self._stream = decoder._stream
        self._x, self._y = decoder._columns  # the current columns, and where the next go

    def run(self) -> None:
        packed, decoder = self._packed, self._decoder
        for number, layer in enumerate(packed.attention):
            if number == 0:
                self._embed()
            self._attend(layer, decoder._keys[number], decoder._values[number])
        self._norm(packed.norm)
        rate = 1
        for number, block in enumerate(packed.upsamples):
            self._upsample(block, decoder._taps_past[number], rate, last=number == len(packed.upsamples) - 1)
            rate *= block.repeat.samples
        self._decode()

    def _conv(
        self,
        layer: Conv,
        rate: int,
        *,
        residual: bool = False,
        stream: bool = False,
        head: int | None = None,
        level: Level | None = None,
        snake: Snake | None = None,
        activation: int = conv.IDENTITY,
    ) -> None:
        """``layer`` over the current columns, ``rate`` per frame; ``residual`` and ``stream``: add the residual
        stream, and write it; ``head``: also make columns with so many in front, those absent at ``level`` zeroed."""
        act = None
        if head is not None:
            lag, out_rate = (level.lag, level.rate) if level else (0, 1)
            act = Columns(self._y, head, lag, out_rate, self._inputs.positions)
        columns = self._bucket.frames * rate
        conv.conv(
            self._x, layer, self._bucket.rows, columns,
            tiles.choose(layer, self._bucket.rows * columns, gated=activation == conv.SWIGLU),
            residual=self._stream if residual else None, stream=self._stream if stream else None,
            act=act, activation=activation, snake=snake,
        )  # fmt: skip
        if act is not None:
            self._x, self._y = self._y, self._x

    def _exchange(self, past: Tensor, rate: int) -> None:
        given = self._inputs
        columns = self._bucket.frames * rate
        history.exchange(self._x, past, given.slots, given.positions, given.lengths, columns, rate)

    def _embed(self) -> None:
        given, packed = self._inputs, self._packed
        rows.embed(
            given.codes, given.positions, packed.embedding, packed.frequencies, self._stream, self._decoder._rotary
        )

    def _norm(self, gain: Tensor) -> None:
        rows.rms_norm(self._stream, gain, self._packed.shape.rms_norm_eps, self._x, self._bucket.size)

    def _attend(self, layer: AttentionLayer, keys: Tensor, values: Tensor) -> None:
        given = self._inputs
        self._norm(layer.norm)
        self._conv(layer.qkv, 1, head=0)
        attention.window_attention(
            self._x, self._decoder._rotary, keys, values, given.slots, given.positions, given.lengths, self._y,
            self._bucket.frames, self._packed.shape.heads,
        )  # fmt: skip
        self._x, self._y = self._y, self._x
        self._conv(layer.out, 1, residual=True, stream=True)
        self._norm(layer.mlp_norm)
        self._conv(layer.gate_up, 1, head=0, activation=conv.SWIGLU)
        self._conv(layer.down, 1, residual=True, stream=True)

    def _upsample(self, block: Upsample, past: Tensor, rate: int, last: bool) -> None:
        self._conv(block.repeat, rate, stream=True, head=len(block.taps) - 1)
        rate *= block.repeat.samples
        self._exchange(past, rate)
        rows.depthwise_norm(
            self._x, block.taps, block.taps_bias, block.gain, block.shift, block.norm_eps, self._y,
            self._bucket.rows, self._bucket.frames * rate,
        )  # fmt: skip
        self._x, self._y = self._y, self._x
        self._conv(block.widen, rate, head=0, activation=conv.GELU)
        self._conv(block.narrow, rate, residual=True, head=self._packed.first.head if last else 0)

    def _decode(self) -> None:
        packed, decoder = self._packed, self._decoder
        base, *levels = packed.shape.levels[len(packed.upsamples) :]
        self._exchange(decoder._first_past, base.rate)
        self._conv(
            packed.first, base.rate, head=packed.blocks[0].transposed.head, level=base, snake=packed.blocks[0].act
        )
        for number, (block, level) in enumerate(zip(packed.blocks, levels, strict=True)):
            self._exchange(decoder._transposed_past[number], base.rate)
            self._conv(
                block.transposed, base.rate, stream=True,
                head=block.units[0].conv1.head, level=level, snake=block.units[0].act1,
            )  # fmt: skip
            following = [(unit.conv1.head, unit.act1) for unit in block.units[1:]]
            if number + 1 < len(packed.blocks):
                after = packed.blocks[number + 1]
                following.append((after.transposed.head, after.act))
            else:
                following.append((packed.last.head, packed.last_act))
            for place, (unit, (head, snake)) in enumerate(zip(block.units, following, strict=True)):
                self._exchange(decoder._units_past[number][place], level.rate)
                self._conv(unit.conv1, level.rate, head=0, snake=unit.act2)
                more = place + 1 < len(block.units)
                self._conv(unit.conv2, level.rate, residual=True, stream=more, head=head, level=level, snake=snake)
            base = level
        self._exchange(decoder._last_past, base.rate)
        rows.wave(self._x, packed.last, decoder.wave, self._bucket.rows, self._bucket.frames * base.rate)
