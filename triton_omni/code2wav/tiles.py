"""Program shapes of the convolutions, measured on an H200 (docs/performance/code2wav.md)."""

from __future__ import annotations

from triton_omni.code2wav.kernels.conv import Conv, Tile

# Programs from which large tiles pay: two for each multiprocessor of an H200. Below that more, smaller ones fill it.
FULL = 264


def choose(layer: Conv, columns: int, *, gated: bool = False) -> Tile:
    """``columns``: of the whole batch. ``gated``: half of the outputs are gates."""
    outputs = layer.outputs // 2 if gated else layer.outputs
    large = _large(layer, outputs, gated)
    if _programs(large, columns, outputs) >= FULL or (layer.taps == 1 and large.block_m < columns):
        return large
    deep = layer.channels_in % 128 == 0
    if columns <= 64 and deep and layer.taps == 1:
        return Tile(16, min(32, _power(outputs)), 0, 128, 4, 4)
    block_k = min(64, layer.channels_in & -layer.channels_in)
    if gated or _programs(Tile(64, 64), columns, outputs) >= FULL // 2:
        return Tile(64, min(64, _power(outputs)), 0, block_k, 4, 4)
    return Tile(64, min(32, _power(outputs)), 0, 128 if deep else block_k, 4, 4)


def _large(layer: Conv, outputs: int, gated: bool) -> Tile:
    block_k = min(64, layer.channels_in & -layer.channels_in)
    if outputs % 128 == 0:
        if layer.taps == 2:
            return Tile(128, 128, 0, block_k, 4, 3)
        return Tile(256 if layer.taps > 2 and outputs <= 1024 and not gated else 128, 128, 0, block_k, 8, 3)
    if outputs % 192 == 0:
        return Tile(128, 128, 64, block_k, 8, 4)
    if outputs % 96 == 0:
        return Tile(128, 64, 32, block_k, 4 if block_k < 64 else 8, 4 if block_k < 64 else 3)
    return Tile(128, min(64, _power(outputs)), 0, block_k, 4, 3)


def _programs(tile: Tile, columns: int, outputs: int) -> int:
    return -(-columns // tile.block_m) * -(-outputs // (tile.block_n + tile.block_n2))


def _power(outputs: int) -> int:
    """The power of two that holds so many outputs; at least what tensor cores take."""
    return max(16, 1 << (outputs - 1).bit_length())
