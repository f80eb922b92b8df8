"""Compressed audio out, by FFmpeg's encoders (PyAV): each packet leaves as soon as the encoder has it.

Samples come in as int16 little-endian bytes, 24 kHz mono. A stream is written without ever going back, so its header
cannot know the length; a whole file is written with it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from triton_omni.model_config import SAMPLE_RATE_HZ


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """One of FFmpeg's: ``sample_format`` is what the encoder takes; ``bit_rate`` 0: lossless. ``muxer_options`` hold
    for streams only. ``media_type``: of the file.
    """

    container: str
    encoder: str
    sample_format: str
    media_type: str
    bit_rate: int = 0
    codec_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    muxer_options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether this FFmpeg was built with it."""
        try:
            av.Codec(self.encoder, "w")
            av.ContainerFormat(self.container, "w")
        except (ValueError, av.FFmpegError):
            return False
        return True


CODECS = {
    "flac": Codec("flac", "flac", "s16", "audio/flac"),
    "mp3": Codec("mp3", "libmp3lame", "s16p", "audio/mpeg", 64_000, muxer_options={"write_xing": "0"}),
    # A page of Ogg holds up to a second unless told otherwise; a fifth is little beside a chunk of speech.
    "opus": Codec(
        "ogg",
        "libopus",
        "s16",
        "audio/ogg",
        48_000,
        codec_options={"application": "voip", "compression_level": "5"},
        muxer_options={"page_duration": "200000"},
    ),
    "aac": Codec("adts", "aac", "fltp", "audio/aac", 64_000),
}


class CompressedEncoder:
    """An ``AudioEncoder`` of ``codec``."""

    def __init__(self, codec: Codec, *, sink: Any = None) -> None:
        self._sink = _Sink() if sink is None else sink
        stream_only = codec.muxer_options if sink is None else {}
        options = {"flush_packets": "1", "fflags": "+bitexact", "metadata_header_padding": "0", **stream_only}
        self._container = av.open(self._sink, "w", format=codec.container, options=options)
        self._stream: Any = self._container.add_stream(
            codec.encoder, rate=SAMPLE_RATE_HZ, layout="mono", options=dict(codec.codec_options)
        )
        self._stream.format = codec.sample_format
        if codec.bit_rate:
            self._stream.bit_rate = codec.bit_rate
        self._samples = 0
        self._open = True

    def encode(self, pcm: bytes) -> bytes:
        self._add(np.frombuffer(pcm, np.int16))
        return self._taken()

    def _add(self, samples: npt.NDArray[np.int16]) -> None:
        if samples.size:
            frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = SAMPLE_RATE_HZ, self._samples
            self._samples += samples.size
            self._container.mux(self._stream.encode(frame))

    def finish(self) -> bytes:
        if self._open:
            self._open = False
            if not self._samples:
                self._add(np.zeros(_SHORTEST_SAMPLES, np.int16))
            self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._taken()

    def _taken(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Sink) else b""


# Muxers refuse to end a file without a packet: silence stands for an answer without speech.
_SHORTEST_SAMPLES = 1_024


def compressed_file(codec: Codec, pcm: bytes) -> bytes:
    """The whole file."""
    file = io.BytesIO()
    encoder = CompressedEncoder(codec, sink=file)
    encoder.encode(pcm)
    encoder.finish()
    return file.getvalue()


class _Sink:
    """A file that can only be written to; FFmpeg then does not try to go back."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
