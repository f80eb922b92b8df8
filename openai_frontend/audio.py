"""Audio out: each format as a stream and as one file, and base64 that survives concatenation.

Samples come in as int16 little-endian bytes, 24 kHz mono. A new format is one more entry of ``FORMATS``.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol

import pybase64

from openai_frontend.encoders import CODECS, CompressedEncoder, compressed_file
from triton_omni.model_config import SAMPLE_RATE_HZ

SAMPLE_BYTES = 2
# The size a WAV header gives while the end is unknown; readers then read to the end of the file.
_UNKNOWN_SIZE = 0xFFFF_FFFF
# Whole samples (2 bytes) and whole base64 groups (3 bytes) at once.
_GROUP_BYTES = 6


class AudioEncoder(Protocol):
    """Bytes of one file, piece by piece: what ``encode`` and then ``finish`` return, joined, is the file."""

    def encode(self, pcm: bytes) -> bytes: ...
    def finish(self) -> bytes: ...


class Pcm16Encoder:
    """Bare samples."""

    def encode(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""


class WavEncoder:
    """One WAV file as a stream: the header once, with unknown sizes, then bare samples."""

    def __init__(self) -> None:
        self._header = wav_header(None)

    def encode(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.encode(b"")


def wav_header(pcm_bytes: int | None) -> bytes:
    """44 bytes; None: the length is unknown."""
    riff, data = (_UNKNOWN_SIZE, _UNKNOWN_SIZE) if pcm_bytes is None else (36 + pcm_bytes, pcm_bytes)
    byte_rate = SAMPLE_RATE_HZ * SAMPLE_BYTES
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE"),
        *(b"fmt ", 16, 1, 1, SAMPLE_RATE_HZ, byte_rate, SAMPLE_BYTES, 8 * SAMPLE_BYTES),
        *(b"data", data),
    )


def wav_file(pcm: bytes) -> bytes:
    return wav_header(len(pcm)) + pcm


@dataclasses.dataclass(frozen=True, slots=True)
class AudioFormat:
    """``stream`` makes an encoder, ``whole`` a file. ``compressed``: both take long enough for a thread."""

    stream: Callable[[], AudioEncoder]
    whole: Callable[[bytes], bytes]
    media_type: str
    compressed: bool = False


# What this installation can write; a format whose encoder is not built into FFmpeg is not here.
FORMATS: dict[str, AudioFormat] = {
    "wav": AudioFormat(WavEncoder, wav_file, "audio/wav"),
    "pcm16": AudioFormat(Pcm16Encoder, bytes, f"audio/pcm;rate={SAMPLE_RATE_HZ}"),
} | {
    name: AudioFormat(
        partial(CompressedEncoder, codec), partial(compressed_file, codec), codec.media_type, compressed=True
    )
    for name, codec in CODECS.items()
    if codec.available
}


def base64_text(data: bytes) -> str:
    return pybase64.b64encode_as_string(data)  # ten times as fast as the standard library's


class AudioStream:
    """An encoder whose pieces leave as base64. Clients may decode each piece or join the texts first (the SDK's
    accumulators do), so every piece but the last ends on a whole base64 group; at most five bytes wait for the next.
    """

    def __init__(self, audio_format: str) -> None:
        self.compressed = FORMATS[audio_format].compressed
        self._encoder = FORMATS[audio_format].stream()
        self._rest = b""

    def encode(self, pcm: bytes) -> bytes:
        """Base64 of what can leave now; may be empty."""
        data = self._rest + self._encoder.encode(pcm)
        cut = len(data) - len(data) % _GROUP_BYTES
        self._rest = data[cut:]
        return pybase64.b64encode(data[:cut])

    def finish(self) -> bytes:
        rest, self._rest = self._rest + self._encoder.finish(), b""
        return pybase64.b64encode(rest)
