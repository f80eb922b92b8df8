"""The convolutional layers of code2wav, each continuing where its session's last chunk ended.

Parameter names are the checkpoint's. Reference: transformers' Qwen3OmniMoeCausalConvNet, -CausalTransConvNet,
-ConvNeXtBlock, -SnakeBeta, -Code2WavDecoderResidualUnit and -Code2WavDecoderBlock.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_omni.code2wav.slots import History, Span

RESIDUAL_DILATIONS = (1, 3, 9)
KERNEL_SIZE = 7


class CausalConv(nn.Module):
    """A convolution that sees its session's past. [B, in, L] -> [B, out, L]; may zero absent samples of x itself."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel_size: int, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels_out, kernel_size, dilation=dilation, groups=groups)
        self.history = History(channels_in, (kernel_size - 1) * dilation)

    def forward(self, x: Tensor, span: Span) -> Tensor:
        out: Tensor = self.conv(self.history.extend(span.hide_absent(x), span))
        return out


class PointwiseConv(nn.Module):
    """A convolution of kernel 1: no past. Its own class because the checkpoint names it ``conv2.conv``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class Repeat(nn.Module):
    """A transposed convolution whose kernel equals its stride: every input makes its own outputs, no past.
    [B, C, L] -> [B, C, L * stride].
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(channels, channels, stride, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class OverlappingTransposedConv(nn.Module):
    """A transposed convolution with kernel 2 * stride: each block of ``stride`` outputs needs an input and the one
    after it. The block is emitted with the later input, so that the output lags one input (``stride`` samples).
    [B, in, L] -> [B, out, L * stride].
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.ConvTranspose1d(channels_in, channels_out, 2 * stride, stride)
        self.history = History(channels_in, 1)

    def forward(self, x: Tensor, span: Span) -> Tensor:
        out: Tensor = self.conv(self.history.extend(span.hide_absent(x), span))
        return out[..., self.stride : -self.stride]


class SnakeBeta(nn.Module):
    """x + sin²(x · e^alpha) / (e^beta + 1e-9), per channel (Liu et al. 2020, arXiv:2006.08195). [B, C, L].

    ``prepare`` computes the exponentials once the parameters are loaded.
    """

    frequency: Tensor
    magnitude: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def prepare(self) -> None:
        frequency, magnitude = self.alpha.exp(), (self.beta.exp() + 1e-9).reciprocal()
        self.register_buffer("frequency", frequency.unsqueeze(1), persistent=False)  # [C, 1]
        self.register_buffer("magnitude", magnitude.unsqueeze(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wave = (x * self.frequency).sin_()
        return wave.square_().mul_(self.magnitude).add_(x)


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution, then a pointwise MLP, with a scaled residual. [B, C, L] -> [B, C, L]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, KERNEL_SIZE, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, span: Span) -> Tensor:
        h = self.norm(self.dwconv(x, span).transpose(1, 2))  # [B, L, C]
        h = self.gamma * self.pwconv2(F.gelu(self.pwconv1(h)))
        out: Tensor = x + h.transpose(1, 2)
        return out


class UpsampleBlock(nn.ModuleList):
    """[B, C, L] -> [B, C, L * stride]. A list, because the checkpoint numbers its two parts."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__([Repeat(channels, stride), ConvNeXtBlock(channels)])

    def forward(self, x: Tensor, above: Span) -> Tensor:
        repeat, convnext = self
        out: Tensor = convnext(repeat(x), above)
        return out


class ResidualUnit(nn.Module):
    """[B, C, L] -> [B, C, L]."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, KERNEL_SIZE, dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = PointwiseConv(channels)

    def forward(self, x: Tensor, span: Span) -> Tensor:
        out: Tensor = self.conv2(self.act2(self.conv1(self.act1(x), span)))
        return out.add_(x)


class DecoderBlock(nn.Module):
    """Upsamples by ``stride``, then three dilated residual units. [B, in, L] -> [B, out, L * stride]."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        units = (ResidualUnit(channels_out, dilation) for dilation in RESIDUAL_DILATIONS)
        transposed = OverlappingTransposedConv(channels_in, channels_out, stride)
        self.block = nn.ModuleList([SnakeBeta(channels_in), transposed, *units])

    def forward(self, x: Tensor, below: Span, above: Span) -> Tensor:
        act, transposed, *units = self.block
        x = transposed(act(x), below)
        for unit in units:
            x = unit(x, above)
        return x
