"""Bytes of a media file to what the model's processor takes: waveform, RGB image, RGB frames.

Every function raises InvalidRequestError with the ``field`` it is given, when the bytes cannot be decoded, hold
nothing, or exceed a limit. Without PyAV or soxr only files that need them are refused.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image, ImageOps, UnidentifiedImageError

from triton_omni.errors import InvalidRequestError
from triton_omni.thinker.config import ThinkerConfig


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


av, soxr = _installed("av"), _installed("soxr")

Waveform = npt.NDArray[np.float32]
Frames = npt.NDArray[np.uint8]

# Only self-contained files: a playlist (HLS, concat, image2) would make FFmpeg open what it names.
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,wav,flac,mp3,aac"
# And only pictures: some of Pillow's plugins run other programs (EPS) or open what a file names.
_IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_BLOCK_SAMPLES = 1 << 16  # of all channels together
MAX_CHANNELS = 64
MAX_RATE_HZ = 384_000
# More cannot be meant: stops files whose frames take no time.
MAX_VIDEO_FPS = 240
_UNKNOWN_FRAMES = 1 << 62  # libsndfile's word for streams that do not tell their length is near 2^63


def decode_audio(data: bytes, field: str, config: ThinkerConfig, *, rate_hz: int, min_samples: int) -> Waveform:
    """float32 [samples] at ``rate_hz``, channels averaged. libsndfile's formats first, then FFmpeg's (m4a, webm)."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_track(file.samplerate, file.channels, field)
            if file.frames < _UNKNOWN_FRAMES:
                _check_length(file.frames / file.samplerate, field, config.max_audio_s)
            blocks = file.blocks(_BLOCK_SAMPLES // file.channels, dtype="float32", always_2d=True)
            mono = (block.mean(axis=1, dtype=np.float32) for block in blocks)
            samples = _resampled(mono, file.samplerate, rate_hz, field, config.max_audio_s)
    except soundfile.SoundFileError:
        samples = _decode_track(data, field, config, rate_hz)
    return _checked_audio(samples, field, rate_hz, min_samples)


def decode_video_audio(data: bytes, field: str, config: ThinkerConfig, *, rate_hz: int, min_samples: int) -> Waveform:
    """float32 [samples]: the audio track of a video file."""
    return _checked_audio(_decode_track(data, field, config, rate_hz), field, rate_hz, min_samples)


def decode_image(data: bytes, field: str, config: ThinkerConfig) -> Image.Image:
    """RGB, turned upright as its EXIF says, first frame of an animation."""
    try:
        image = Image.open(io.BytesIO(data), formats=_IMAGES)
        width, height = image.size
        if width * height > config.max_image_pixels:
            raise InvalidRequestError(
                field, f"the image has {width} x {height} pixels; at most {config.max_image_pixels} are accepted"
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except InvalidRequestError:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, ValueError, SyntaxError, struct.error and more
        # What it says of a file of unknown kind is an address in memory.
        told = f"{', '.join(_IMAGES)} are accepted" if isinstance(error, UnidentifiedImageError) else error
        raise InvalidRequestError(field, f"is no image that Pillow can decode: {told}") from None


def decode_video(data: bytes, field: str, config: ThinkerConfig) -> Frames:
    """uint8 [frames, height, width, 3]: what is on screen at 0, 1/fps, 2/fps, … seconds."""
    _check_installed(av, "PyAV", field)
    try:
        with _open(data) as container:
            if not container.streams.video:
                raise InvalidRequestError(field, "has no video track")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            stream.codec_context.options = {"max_pixels": str(config.max_image_pixels)}  # also where a frame grows
            pixels = stream.width * stream.height
            if pixels > config.max_image_pixels:
                raise InvalidRequestError(
                    field,
                    f"has frames of {stream.width} x {stream.height} pixels; at most {config.max_image_pixels} are "
                    "accepted",
                )
            limit = min(config.max_video_frames, config.max_video_pixels // max(pixels, 1))
            too_long = InvalidRequestError(
                field,
                f"is longer than {limit / config.video_fps:g} s, the most that is accepted at "
                f"{stream.width} x {stream.height} pixels and {config.video_fps:g} frames per second",
            )
            if _told_length_s(container, stream) > limit / config.video_fps:
                raise too_long
            decoded = _counted(container.decode(stream), limit * MAX_VIDEO_FPS / config.video_fps, field)
            frames: list[Frames] = []
            for frame in _on_screen(decoded, config.video_fps):
                if len(frames) >= limit:
                    raise too_long
                frames.append(frame.to_ndarray(format="rgb24"))
    except (av.FFmpegError, ValueError) as error:
        raise InvalidRequestError(field, f"is no video that FFmpeg can decode: {_reason(error)}") from None
    if not frames:
        raise InvalidRequestError(field, "holds no frames")
    if len({frame.shape for frame in frames}) > 1:
        raise InvalidRequestError(field, "changes its frame size on the way; one size is accepted")
    return np.stack(frames)


def _told_length_s(container: Any, stream: Any) -> float:
    """What the file says of itself; 0 when it does not. Refusing by it saves decoding up to the limit."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return float((container.duration or 0) / av.time_base)


def _counted(frames: Iterable[Any], most: float, field: str) -> Iterator[Any]:
    for count, frame in enumerate(frames):
        if count > most:
            raise InvalidRequestError(field, f"has more than {MAX_VIDEO_FPS} frames per second")
        yield frame


def _on_screen(frames: Iterable[Any], fps: float) -> Iterator[Any]:
    """The frame shown at each multiple of 1/fps seconds after the first frame."""
    shown, start_s, taken, end_s = None, 0.0, 0, 0.0
    for frame in frames:
        at_s = float(frame.time or 0.0)
        if shown is None:
            start_s = at_s
        while shown is not None and start_s + taken / fps < at_s - 1e-6:
            yield shown
            taken += 1
        shown = frame
        end_s = at_s + float((frame.duration or 0) * (frame.time_base or 0))
    while shown is not None and (taken == 0 or start_s + taken / fps < end_s - 1e-6):
        yield shown
        taken += 1


def _decode_track(data: bytes, field: str, config: ThinkerConfig, rate_hz: int) -> Waveform:
    _check_installed(av, "PyAV", field)
    try:
        with _open(data) as container:
            if not container.streams.audio:
                raise InvalidRequestError(field, "has no audio track")
            stream = container.streams.audio[0]
            _check_track(stream.rate, stream.channels, field)
            _check_length(_told_length_s(container, stream), field, config.max_audio_s)
            planar = av.AudioResampler(format="fltp")
            mono = (
                part.to_ndarray().mean(axis=0, dtype=np.float32)  # [channels, samples] -> [samples]
                for frame in container.decode(stream)
                for part in planar.resample(frame)
            )
            return _resampled(mono, stream.rate, rate_hz, field, config.max_audio_s)
    except (av.FFmpegError, ValueError) as error:
        raise InvalidRequestError(
            field, f"is no audio that libsndfile or FFmpeg can decode: {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    """FFmpeg's words without its number and the name of a file that there is not."""
    return getattr(error, "strerror", None) or str(error)


def _open(data: bytes) -> Any:
    return av.open(io.BytesIO(data), options={"format_whitelist": _CONTAINERS})


def _resampled(blocks: Iterable[Waveform], from_hz: int, to_hz: int, field: str, max_s: float) -> Waveform:
    """Block by block, so that memory follows the result and a file that unpacks without end is stopped early."""
    if from_hz != to_hz:
        _check_installed(soxr, "soxr", field)
    stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32") if from_hz != to_hz else None
    parts: list[Waveform] = []
    seen_samples = 0
    for block in blocks:
        seen_samples += len(block)
        _check_length(seen_samples / from_hz, field, max_s)
        parts.append(stream.resample_chunk(block) if stream else block)
    if stream and seen_samples:
        parts.append(stream.resample_chunk(np.empty(0, np.float32), last=True))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _check_installed(module: Any, name: str, field: str) -> None:
    if module is None:
        raise InvalidRequestError(field, f"takes {name} to decode, which this server does not have")


def _check_length(length_s: float, field: str, max_s: float) -> None:
    if length_s > max_s:
        raise InvalidRequestError(field, f"is longer than {max_s:g} s, the most that is accepted")


def _check_track(rate_hz: int, channels: int, field: str) -> None:
    if not 1 <= rate_hz <= MAX_RATE_HZ:
        raise InvalidRequestError(field, f"has {rate_hz} samples a second; 1 to {MAX_RATE_HZ} are accepted")
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidRequestError(field, f"has {channels} channels; 1 to {MAX_CHANNELS} are accepted")


def _checked_audio(samples: Waveform, field: str, rate_hz: int, min_samples: int) -> Waveform:
    if len(samples) < min_samples:
        shortest_ms = math.ceil(1000 * min_samples / rate_hz)
        raise InvalidRequestError(
            field, f"holds {len(samples)} samples at {rate_hz} Hz; at least {min_samples} ({shortest_ms} ms) are needed"
        )
    if not np.isfinite(samples).all():
        raise InvalidRequestError(field, "holds samples that are not finite numbers")
    return samples
