"""Dimensions of the network, and how far each of its time resolutions is behind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from triton_omni.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A time resolution. ``rate``: samples per codec frame; ``lag``: samples by which it is behind the frames."""

    rate: int
    lag: int


@dataclasses.dataclass(frozen=True, slots=True)
class Code2WavShape:
    """Dimensions, from the checkpoint's ``code2wav_config``."""

    code_groups: int
    codebook_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Code2WavShape:
        """Raises CheckpointError naming a missing key, or a value this decoder does not implement."""
        rope = config.get("rope_parameters") or {}
        _require("hidden_act", config.get("hidden_act", "silu"), "silu")
        _require("rope_parameters.rope_type", rope.get("rope_type", "default"), "default")
        try:
            return cls(
                code_groups=config["num_quantizers"],
                codebook_size=config["codebook_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                window=config["sliding_window"],
                rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
                rms_norm_eps=config["rms_norm_eps"],
                attention_bias=config.get("attention_bias", False),
                upsampling_ratios=tuple(config["upsampling_ratios"]),
                upsample_rates=tuple(config["upsample_rates"]),
                decoder_dim=config["decoder_dim"],
            )
        except KeyError as error:
            raise CheckpointError(f"code2wav_config: no {error.args[0]!r}") from None

    @property
    def levels(self) -> tuple[Level, ...]:
        """The frames, then one level per upsampling ratio and per upsample rate; the latter each wait for one input."""
        levels = [Level(1, 0)]
        for ratio in self.upsampling_ratios:
            levels.append(Level(levels[-1].rate * ratio, levels[-1].lag * ratio))
        for rate in self.upsample_rates:
            levels.append(Level(levels[-1].rate * rate, (levels[-1].lag + 1) * rate))
        return tuple(levels)

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsampling_ratios + self.upsample_rates)

    @property
    def lookahead_samples(self) -> int:
        """Samples at the wave's end that wait for the next frame. The last frame's are never made."""
        return self.levels[-1].lag


def _require(key: str, value: Any, only: str) -> None:
    if value != only:
        raise CheckpointError(f"code2wav_config: {key} must be {only!r}, got {value!r}")
