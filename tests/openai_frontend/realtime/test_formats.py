"""Samples on the wire."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from openai_frontend.realtime.formats import Resampler, WireFormat, resampled

ALL = np.arange(-32_768, 32_768, dtype=np.int16)


@pytest.mark.parametrize(("name", "subtype"), [("audio/pcmu", "ULAW"), ("audio/pcma", "ALAW")])
def test_g711_is_libsndfiles(name, subtype):
    wire = WireFormat(name, 8_000)
    codes = bytes(range(256))
    there, _ = soundfile.read(
        io.BytesIO(codes), dtype="int16", format="RAW", subtype=subtype, channels=1, samplerate=8_000
    )
    assert np.array_equal(wire.decode(codes), there)
    levels = np.sort(there.astype(int))
    wide = ALL.astype(int)
    above = levels[np.minimum(np.searchsorted(levels, wide), 255)]
    below = levels[np.maximum(np.searchsorted(levels, wide, "right") - 1, 0)]
    encoded = wire.decode(wire.encode(ALL))
    assert np.all((encoded == above) | (encoded == below))  # one of the two levels around it
    assert np.abs(encoded - wide).max() <= 1_024


def test_pcm_is_the_samples():
    wire = WireFormat("audio/pcm", 24_000)
    assert wire.encode(wire.decode(b"\x01\x00\xff\xff")) == b"\x01\x00\xff\xff"
    assert wire.decode(b"\x01\x00\xff\xff").tolist() == [1, -1]


def test_a_stream_in_pieces_is_the_whole_resampled():
    tone = (10_000 * np.sin(np.arange(24_000) / 7)).astype(np.int16)
    stream = Resampler(24_000, 16_000)
    pieces = [stream.push(tone[start : start + 777], last=start + 777 >= len(tone)) for start in range(0, 24_000, 777)]
    assert len(np.concatenate(pieces)) == 16_000
    assert np.abs(np.concatenate(pieces).astype(int) - resampled(tone, 24_000, 16_000)).max() <= 4  # soxr dithers
