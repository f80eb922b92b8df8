"""Audio on the realtime wire: raw samples, 16 bit or G.711, and the change of rate to and from the model's."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soxr

Samples = npt.NDArray[np.int16]
Codes = npt.NDArray[np.uint8]

_ULAW_BIAS = 0x84
_ULAW_CLIP = 32635


@dataclasses.dataclass(frozen=True, slots=True)
class WireFormat:
    """``type``: "audio/pcm" (int16 little-endian), "audio/pcmu" or "audio/pcma" (G.711). Mono."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate_hz: int

    @property
    def json(self) -> dict[str, Any]:
        return {"type": self.type, "rate": self.rate_hz} if self.type == "audio/pcm" else {"type": self.type}

    @property
    def sample_bytes(self) -> int:
        return 2 if self.type == "audio/pcm" else 1

    def decode(self, data: bytes) -> Samples:
        """``data``: whole samples."""
        if self.type == "audio/pcm":
            return np.frombuffer(data, "<i2")
        table = ulaw_samples() if self.type == "audio/pcmu" else alaw_samples()
        return table[np.frombuffer(data, np.uint8)]

    def encode(self, samples: Samples) -> bytes:
        if self.type == "audio/pcm":
            return samples.astype("<i2", copy=False).tobytes()
        return (ulaw_codes(samples) if self.type == "audio/pcmu" else alaw_codes(samples)).tobytes()


PCM16_24K = WireFormat("audio/pcm", 24_000)
# The names of the protocol's beta.
BETA_NAMES = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}


class Resampler:
    """int16 samples from one rate to another, as they come; the same rate passes through."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._stream = None if from_hz == to_hz else soxr.ResampleStream(from_hz, to_hz, 1, dtype="int16")

    def push(self, samples: Samples, *, last: bool = False) -> Samples:
        """What can leave now; with ``last`` all the rest, after which nothing may be pushed."""
        if self._stream is None:
            return samples
        changed: Samples = self._stream.resample_chunk(samples, last=last)
        return changed


def resampled(samples: Samples, from_hz: int, to_hz: int) -> Samples:
    return Resampler(from_hz, to_hz).push(samples, last=True)


@cache
def ulaw_samples() -> Samples:
    """The sample of each of G.711's 256 mu-law codes."""
    code = ~np.arange(256) & 0xFF
    magnitude = ((((code & 0xF) << 3) + _ULAW_BIAS) << ((code & 0x70) >> 4)) - _ULAW_BIAS
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)


@cache
def alaw_samples() -> Samples:
    """The sample of each of G.711's 256 A-law codes."""
    code = np.arange(256) ^ 0x55
    segment, step = (code & 0x70) >> 4, (code & 0xF) << 4
    magnitude = np.where(segment == 0, step + 8, (step + 0x108) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, magnitude, -magnitude).astype(np.int16)


def ulaw_codes(samples: Samples) -> Codes:
    wide = samples.astype(np.int32)
    magnitude = np.minimum(np.abs(wide), _ULAW_CLIP) + _ULAW_BIAS
    exponent = np.frexp(magnitude)[1] - 8
    mantissa = (magnitude >> (exponent + 3)) & 0xF
    codes: Codes = (~(np.where(wide < 0, 0x80, 0) | (exponent << 4) | mantissa) & 0xFF).astype(np.uint8)
    return codes


def alaw_codes(samples: Samples) -> Codes:
    wide = samples.astype(np.int32) >> 3
    magnitude = np.where(wide < 0, -wide - 1, wide)
    segment = np.maximum(np.frexp(magnitude)[1] - 5, 0)
    mantissa = (magnitude >> np.maximum(segment, 1)) & 0xF
    codes: Codes = (((segment << 4) | mantissa) ^ np.where(wide < 0, 0x55, 0xD5)).astype(np.uint8)
    return codes
