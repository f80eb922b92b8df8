"""Media files in the forms people send; what cannot be used is refused by the name of its field."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from tests.thinker.support import Media, mkv, png, wav
from triton_omni.errors import InvalidRequestError
from triton_omni.thinker import media as decode
from triton_omni.thinker.config import ThinkerConfig

FIELD = "messages[0].content[1]"
CONFIG = ThinkerConfig()
LIMITS: dict[str, Any] = {"rate_hz": 16_000, "min_samples": 201}


def tone(rate_hz: int, seconds: float = 0.5) -> np.ndarray:
    return np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz) * 0.5


def webm(samples: np.ndarray, rate_hz: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32)[None], format="flt", layout="mono")
        frame.sample_rate = rate_hz
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def refused(function: Any, data: bytes, config: ThinkerConfig = CONFIG, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        function(data, FIELD, config, **options)
    assert raised.value.field == FIELD
    return raised.value.message


def test_samples_at_the_model_s_rate_are_kept() -> None:
    samples = tone(16_000).astype(np.float32)
    np.testing.assert_array_equal(decode.decode_audio(wav(samples, subtype="FLOAT"), FIELD, CONFIG, **LIMITS), samples)


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("format_", ["WAV", "FLAC", "OGG", "MP3"])
def test_other_rates_are_resampled(rate_hz: int, format_: str) -> None:
    got = decode.decode_audio(wav(tone(rate_hz), rate_hz, format=format_), FIELD, CONFIG, **LIMITS)
    assert abs(len(got) - 8_000) < 1_600  # MP3 adds a frame or two
    spectrum = np.abs(np.fft.rfft(got))
    assert abs(spectrum.argmax() * 16_000 / len(got) - 440) < 5


def test_channels_are_averaged() -> None:
    left = tone(16_000)
    got = decode.decode_audio(wav(np.stack([left, left * 0], axis=1), subtype="FLOAT"), FIELD, CONFIG, **LIMITS)
    np.testing.assert_allclose(got, left / 2, atol=1e-6)


def test_a_browser_s_recording_is_read_by_ffmpeg() -> None:
    got = decode.decode_audio(webm(tone(48_000), 48_000), FIELD, CONFIG, **LIMITS)
    assert abs(len(got) - 8_000) < 400
    assert abs(np.abs(np.fft.rfft(got)).argmax() * 16_000 / len(got) - 440) < 5


@pytest.mark.parametrize("data", [b"", b"not audio at all", wav(tone(16_000))[:30], png(np.zeros((8, 8, 3), np.uint8))])
def test_what_is_no_audio_is_refused(data: bytes) -> None:
    assert "Errno" not in refused(decode.decode_audio, data, **LIMITS)


@pytest.mark.parametrize("samples", [0, 1, 200])
def test_audio_without_sound_is_refused(samples: int) -> None:
    assert f"{samples} samples" in refused(decode.decode_audio, wav(np.zeros(samples)), **LIMITS)


def test_audio_too_long_or_not_finite_is_refused() -> None:
    assert "longer than 1 s" in refused(
        decode.decode_audio, wav(tone(8_000, 1.1), 8_000), ThinkerConfig(max_audio_s=1), **LIMITS
    )
    samples = tone(16_000)
    samples[7] = np.nan
    assert "finite" in refused(decode.decode_audio, wav(samples, subtype="FLOAT"), **LIMITS)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_images_become_rgb(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (20, 10)).save(file, format="TIFF")
    image = decode.decode_image(file.getvalue(), FIELD, CONFIG)
    assert (image.mode, image.size) == ("RGB", (20, 10))


def test_a_photo_is_turned_upright() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(file, format="JPEG", exif=exif)
    assert decode.decode_image(file.getvalue(), FIELD, CONFIG).size == (10, 20)


@pytest.mark.parametrize("data", [b"", b"no image", png(np.zeros((64, 64, 3), np.uint8))[:60], wav(tone(16_000))])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert " object at " not in refused(decode.decode_image, data)


def test_an_image_of_an_unknown_kind_is_told_the_known_ones() -> None:
    assert "PNG, JPEG, WEBP" in refused(decode.decode_image, b"no image")


def test_an_image_too_large_is_refused_before_it_is_unpacked() -> None:
    assert "9000 x 9000" in refused(decode.decode_image, bomb(9_000))
    assert "decompression bomb" in refused(decode.decode_image, bomb(30_000))  # Pillow's own limit
    small = png(np.zeros((9, 9, 3), np.uint8))
    assert "9 x 9" in refused(decode.decode_image, small, ThinkerConfig(max_image_pixels=80))


def bomb(side: int) -> bytes:
    """A PNG whose header promises more than its data hold."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_video_frames_are_those_on_screen(media: Media) -> None:
    np.testing.assert_array_equal(decode.decode_video(media.video, FIELD, CONFIG), media.frames)
    twice = decode.decode_video(media.video, FIELD, ThinkerConfig(video_fps=4))
    np.testing.assert_array_equal(twice, np.repeat(media.frames, 2, axis=0))
    half = decode.decode_video(media.video, FIELD, ThinkerConfig(video_fps=1))
    np.testing.assert_array_equal(half, media.frames[::2])


def test_a_video_s_track(media: Media) -> None:
    got = decode.decode_video_audio(media.video, FIELD, CONFIG, **LIMITS)
    np.testing.assert_array_equal(got, media.track)
    assert "no audio track" in refused(decode.decode_video_audio, mkv(media.frames, None), **LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no video",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        wav(tone(16_000)),
    ],
)
def test_what_is_no_video_is_refused(data: bytes) -> None:
    refused(decode.decode_video, data)


def test_a_video_too_long_or_too_large_is_refused(media: Media) -> None:
    assert "longer than 1.5 s" in refused(decode.decode_video, media.video, ThinkerConfig(max_video_frames=3))
    assert "48" in refused(decode.decode_video, media.video, ThinkerConfig(max_video_pixels=48 * 64 * 2))


@pytest.mark.parametrize(("missing", "named"), [("av", "PyAV"), ("soxr", "soxr")])
def test_a_file_whose_decoder_is_not_installed_is_refused(
    missing: str, named: str, media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, missing, None)
    needs: dict[str, Any] = {
        "av": [(decode.decode_video, media.video, {}), (decode.decode_video_audio, media.video, LIMITS)],
        "soxr": [(decode.decode_audio, wav(tone(8_000), 8_000), LIMITS)],
    }
    for function, data, limits in needs[missing]:
        assert named in refused(function, data, **limits)
    assert decode.decode_audio(media.audio, FIELD, CONFIG, **LIMITS).size
