"""A decoder's weights as the kernels want them: convolutions as matrices over (tap, channel), widths rounded up."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_omni.code2wav import layers
from triton_omni.code2wav.kernels.conv import Conv, Snake
from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.code2wav.transformer import TransformerLayer
from triton_omni.errors import ConfigError

WIDTH_MULTIPLE = 16  # of channels: the least that tensor cores take

M = TypeVar("M", bound=nn.Module)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A pre-transformer layer. ``qkv``: queries, keys, values side by side; ``gate_up``: gate, then up."""

    norm: Tensor
    qkv: Conv
    out: Conv
    mlp_norm: Tensor
    gate_up: Conv
    down: Conv


@dataclasses.dataclass(frozen=True, slots=True)
class Upsample:
    """Repeat and ConvNeXt. ``taps`` float32 [kernel, C]: the depthwise convolution, ``taps_bias`` its bias; ``gain``
    and ``shift``: LayerNorm's."""

    repeat: Conv
    taps: Tensor
    taps_bias: Tensor
    gain: Tensor
    shift: Tensor
    norm_eps: float
    widen: Conv
    narrow: Conv


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    act1: Snake
    conv1: Conv
    act2: Snake
    conv2: Conv


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    act: Snake
    transposed: Conv
    units: list[Unit]


class PackedCode2Wav:
    """Copies of ``model``'s weights on ``device``: matrices in ``dtype``; biases, scales and norms in float32.

    Raises: ConfigError for widths of the pre-transformer that the kernels do not take.
    """

    @torch.inference_mode()
    def __init__(self, model: StreamingCode2Wav, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = model.shape, dtype, device
        _check_widths(model.shape)
        transformer = model.pre_transformer
        self.embedding = self._matrix(model.code_embedding.weight)
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        self.frequencies = (1.0 / self.shape.rope_theta**half).to(device)
        self.attention = [self._attention(_is(layer, TransformerLayer)) for layer in transformer.layers]
        self.norm = self._vector(transformer.norm.weight)
        self.upsamples = [self._upsample(_is(block, layers.UpsampleBlock)) for block in model.upsample]
        first, *blocks, last_act, last = model.decoder
        self.first = self._causal(_is(first, layers.CausalConv))
        self.blocks = [self._block(_is(block, layers.DecoderBlock)) for block in blocks]
        self.last_act = self._snake(_is(last_act, layers.SnakeBeta))
        wave = self._causal(_is(last, layers.CausalConv), width=1)
        self.last = dataclasses.replace(wave, weight=wave.weight.float())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(vars(self)))

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype).contiguous()

    def _vector(self, values: Tensor) -> Tensor:
        return values.detach().float().to(self.device).contiguous()

    def _linear(self, parts: list[nn.Linear], scale: Tensor | None = None) -> Conv:
        """Products with the same input, side by side. channels_out is one part's for a gated pair."""
        weight = torch.cat([part.weight for part in parts]).T  # [in, out]
        bias = torch.cat([part.bias for part in parts]) if parts[0].bias is not None else None
        return Conv(
            self._matrix(weight),
            taps=1,
            channels_in=weight.shape[0],
            channels_out=weight.shape[1],
            bias=None if bias is None else self._vector(bias),
            scale=None if scale is None else self._vector(scale),
        )

    def _attention(self, layer: TransformerLayer) -> AttentionLayer:
        attention, mlp = layer.self_attn, layer.mlp
        gate_up = self._linear([mlp.gate_proj, mlp.up_proj])
        return AttentionLayer(
            norm=self._vector(layer.input_layernorm.weight),
            qkv=self._linear([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._linear([attention.o_proj], layer.self_attn_layer_scale.scale),
            mlp_norm=self._vector(layer.post_attention_layernorm.weight),
            gate_up=dataclasses.replace(gate_up, channels_out=gate_up.outputs // 2),
            down=self._linear([mlp.down_proj], layer.mlp_layer_scale.scale),
        )

    def _upsample(self, block: layers.UpsampleBlock) -> Upsample:
        repeat, convnext = _is(block[0], layers.Repeat), _is(block[1], layers.ConvNeXtBlock)
        weight = repeat.conv.weight  # [in, out, stride]
        assert repeat.conv.bias is not None and convnext.dwconv.conv.bias is not None
        return Upsample(
            repeat=Conv(
                self._matrix(weight.transpose(1, 2).flatten(1)),
                taps=1,
                channels_in=weight.shape[0],
                channels_out=weight.shape[1],
                bias=self._vector(repeat.conv.bias.repeat(weight.shape[2])),
            ),
            taps=self._vector(convnext.dwconv.conv.weight[:, 0].T),
            taps_bias=self._vector(convnext.dwconv.conv.bias),
            gain=self._vector(convnext.norm.weight),
            shift=self._vector(convnext.norm.bias),
            norm_eps=convnext.norm.eps,
            widen=self._linear([convnext.pwconv1]),
            narrow=self._linear([convnext.pwconv2], convnext.gamma),
        )

    def _causal(self, conv: layers.CausalConv | layers.PointwiseConv, width: int | None = None) -> Conv:
        """``width``: channels out as stored, the rounded ones unless told."""
        weight, bias = conv.conv.weight, conv.conv.bias  # [out, in, taps]
        assert bias is not None
        width = width or padded(weight.shape[0])
        weight = F.pad(weight, (0, 0, 0, padded(weight.shape[1]) - weight.shape[1], 0, width - weight.shape[0]))
        return Conv(
            self._matrix(weight.permute(2, 1, 0).flatten(0, 1)),
            taps=weight.shape[2],
            channels_in=weight.shape[1],
            channels_out=width,
            dilation=conv.conv.dilation[0],
            bias=self._vector(F.pad(bias, (0, width - len(bias)))),
        )

    def _transposed(self, conv: layers.OverlappingTransposedConv) -> Conv:
        """As a causal convolution of two taps with ``stride`` samples of output: sample r of column i is
        W[r + stride] x[i - 1] + W[r] x[i].
        """
        weight, bias, stride = conv.conv.weight, conv.conv.bias, conv.stride  # [in, out, 2 * stride]
        assert bias is not None
        inputs, outputs = padded(weight.shape[0]), padded(weight.shape[1])
        weight = F.pad(weight, (0, 0, 0, outputs - weight.shape[1], 0, inputs - weight.shape[0]))
        taps = [weight[..., stride:], weight[..., :stride]]
        return Conv(
            self._matrix(torch.cat([tap.transpose(1, 2).flatten(1) for tap in taps])),
            taps=2,
            channels_in=inputs,
            channels_out=outputs,
            bias=self._vector(F.pad(bias, (0, outputs - len(bias))).repeat(stride)),
        )

    def _snake(self, act: layers.SnakeBeta) -> Snake:
        pad = padded(len(act.alpha)) - len(act.alpha)
        frequency, magnitude = act.alpha.float().exp(), (act.beta.float().exp() + 1e-9).reciprocal()
        return Snake(self._vector(F.pad(frequency, (0, pad))), self._vector(F.pad(magnitude, (0, pad))))

    def _block(self, block: layers.DecoderBlock) -> Block:
        act, transposed, *units = block.block
        return Block(
            act=self._snake(_is(act, layers.SnakeBeta)),
            transposed=self._transposed(_is(transposed, layers.OverlappingTransposedConv)),
            units=[self._unit(_is(unit, layers.ResidualUnit)) for unit in units],
        )

    def _unit(self, unit: layers.ResidualUnit) -> Unit:
        return Unit(self._snake(unit.act1), self._causal(unit.conv1), self._snake(unit.act2), self._causal(unit.conv2))


def padded(channels: int) -> int:
    """Channels as the decoder's convolutions store them; those beyond are zero throughout."""
    return -(-channels // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _check_widths(shape: Code2WavShape) -> None:
    for field in ("hidden_size", "intermediate_size", "head_dim"):
        value, multiple = getattr(shape, field), 2 if field == "head_dim" else WIDTH_MULTIPLE
        if value % multiple:
            raise ConfigError(
                f"float16 and bfloat16 need a code2wav {field} that {multiple} divides, got {value}; use float32",
                field="dtype",
            )


def _is(module: nn.Module, kind: type[M]) -> M:
    assert isinstance(module, kind)
    return module


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list) else []
