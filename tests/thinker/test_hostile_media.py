"""Small files that unpack into huge ones are refused at once, and without the memory they ask for."""

from __future__ import annotations

import io
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from triton_omni.errors import InvalidRequestError
from triton_omni.thinker import media as decode
from triton_omni.thinker.config import ThinkerConfig

FIELD = "messages[0].content[1]"
CONFIG = ThinkerConfig()
LIMITS: dict[str, Any] = {"rate_hz": 16_000, "min_samples": 201}
TEN_HOURS_S = 36_000
MEMORY = 512 * 2**20  # what may be allocated on top, addresses included
CPU_S = 15.0  # generous: the machine may be slow; decoding these files takes minutes


@pytest.fixture(autouse=True)
def little_memory_and_time() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    begun = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
        assert time.process_time() - begun < CPU_S
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(function: Callable[..., Any], data: bytes, words: str, config: ThinkerConfig = CONFIG, **more: Any) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        function(data, FIELD, config, **more)
    assert raised.value.field == FIELD


def silence(seconds: int, rate_hz: int = 1_000) -> bytes:
    """FLAC, written block by block."""
    file = io.BytesIO()
    block = np.zeros(rate_hz * 60, np.int16)
    with soundfile.SoundFile(file, "w", rate_hz, 1, format="FLAC") as sound:
        for _ in range(seconds // 60):
            sound.write(block)
    return file.getvalue()


def packets(format_: str, codec: str, seconds: int) -> bytes:
    """One encoded packet of silence, again and again."""
    file = io.BytesIO()
    with av.open(file, "w", format=format_) as container:
        stream = container.add_stream(codec, rate=8_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8_000
        first, *_ = stream.encode(frame)
        for index in range(seconds * 8_000 // stream.frame_size):
            packet = av.Packet(bytes(first))
            packet.stream, packet.time_base, packet.duration = stream, first.time_base, first.duration
            packet.pts = packet.dts = index * first.duration
            container.mux(packet)
    return file.getvalue()


@pytest.fixture(scope="module")
def long_flac() -> bytes:
    return silence(TEN_HOURS_S)


@pytest.fixture(scope="module")
def long_webm() -> bytes:
    return packets("webm", "libopus", TEN_HOURS_S // 10)


def test_ten_hours_of_silence(long_flac: bytes) -> None:
    assert len(long_flac) < 2**20
    refused(decode.decode_audio, long_flac, "longer than 600 s", **LIMITS)


def test_ten_hours_that_do_not_tell_their_length(long_flac: bytes) -> None:
    """The header's count of samples is 0: a stream."""
    head = bytearray(long_flac[:26])
    head[21] &= 0xF0
    head[22:26] = bytes(4)
    refused(decode.decode_audio, bytes(head) + long_flac[26:], "longer than 600 s", **LIMITS)


def test_an_hour_in_a_browser_s_format(long_webm: bytes) -> None:
    refused(decode.decode_audio, long_webm, "longer than 600 s", **LIMITS)
    refused(decode.decode_video_audio, long_webm, "longer than 600 s", **LIMITS)


@pytest.mark.parametrize(("rate_hz", "channels", "words"), [(2**31 - 1, 1, "a second"), (8_000, 1_000, "channels")])
def test_tracks_that_nobody_records(rate_hz: int, channels: int, words: str) -> None:
    head = struct.pack("<IHHIIHH", 16, 1, channels, rate_hz, (rate_hz * channels * 2) & 0xFFFF_FFFF, channels * 2, 16)
    body = bytes(channels * 2 * 1_000)
    data = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(body)) + body
    refused(decode.decode_audio, b"RIFF" + struct.pack("<I", len(data)) + data, words, **LIMITS)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def zeros(size: int) -> bytes:
    packer, block = zlib.compressobj(1), bytes(2**20)
    return b"".join([*(packer.compress(block) for _ in range(size // 2**20)), packer.flush()])


def png(side: int, *more: bytes, bits: int = 1) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, bits, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zeros(side * (side * bits // 8 + 1) + 2**20))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_000, 12_000, 20_000])
def test_pictures_of_millions_of_equal_pixels(side: int) -> None:
    data = png(side)
    assert len(data) < 2**20
    refused(decode.decode_image, data, f"{side} x {side}|decompression bomb")


@pytest.fixture(scope="module")
def many_zeros() -> bytes:
    """More than may be allocated."""
    return zeros(MEMORY)


@pytest.mark.parametrize("name", [b"zTXt", b"iTXt", b"iCCP"])
def test_pictures_with_remarks_that_unpack_without_end(name: bytes, many_zeros: bytes) -> None:
    body = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[name] + many_zeros
    try:
        assert decode.decode_image(png(8, chunk(name, body)), FIELD, CONFIG).size == (8, 8)  # left out
    except InvalidRequestError as error:
        assert error.field == FIELD


@pytest.mark.parametrize("data", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", b"8BPS\0\1"])
def test_pictures_that_only_other_programs_can_draw(data: bytes) -> None:
    refused(decode.decode_image, data, "PNG, JPEG")


def video(size: int, frames: int, time_base: int = 2, step: int = 1) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=time_base, options={"preset": "ultrafast", "tune": "zerolatency"})
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        picture = av.VideoFrame.from_ndarray(np.zeros((size, size, 3), np.uint8), format="rgb24")
        for index in range(frames):
            picture.pts = index * step
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_a_video_that_is_told_to_be_long_is_not_decoded() -> None:
    refused(decode.decode_video, video(16, 2, step=2_000), "longer than 384 s")


def test_a_video_of_huge_frames() -> None:
    config = ThinkerConfig(max_image_pixels=10_000)
    refused(decode.decode_video, video(128, 2), "128 x 128", config)


def test_frames_that_take_no_time() -> None:
    config = ThinkerConfig(max_video_frames=2)
    refused(decode.decode_video, video(16, 400, time_base=1_000), "240 frames per second", config)


def test_an_ordinary_picture_passes_under_the_same_limits() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4_000, 3_000), "red").save(file, format="JPEG")
    assert decode.decode_image(file.getvalue(), FIELD, CONFIG).size == (4_000, 3_000)
