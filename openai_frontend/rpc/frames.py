"""HTTP/2 frames (RFC 9113) and header blocks (RFC 7541) as bytes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
# Flags; the last two of HEADERS and (PADDED) of DATA.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20
# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)
# What holds until the other side has said otherwise.
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
LAST_STREAM_ID = 2**31 - 1
# Error codes.
REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 7, 8, 11

_HEAD = struct.Struct(">BHBBL")  # the length's 24 bits, kind, flags, stream
_SETTING = struct.Struct(">HL")
_NUMBER = struct.Struct(">L")
_PRIORITY_BYTES = 5
# Blocks that are all the same; a server's error messages are not.
_KNOWN_BLOCKS = 256


class ProtocolError(Exception):
    """The other side does not speak HTTP/2 as we do."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return head(kind, flags, stream_id, len(payload)) + payload


def head(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def read_head(data: bytes, position: int) -> tuple[int, int, int, int]:
    """Payload's size, kind, flags, stream."""
    high, low, kind, flags, stream_id = _HEAD.unpack_from(data, position)
    return high << 16 | low, kind, flags, stream_id & LAST_STREAM_ID


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    return dict(_SETTING.iter_unpack(payload))


def window_update(stream_id: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _NUMBER.pack(size))


def reset(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _NUMBER.pack(code))


def number(payload: bytes, position: int = 0) -> int:
    value: int = _NUMBER.unpack_from(payload, position)[0]
    return value


def unpadded(flags: int, payload: bytes) -> bytes:
    """What DATA or HEADERS carry, without padding and priority."""
    if flags & PADDED:
        if payload[0] >= len(payload):
            raise ProtocolError("more padding than payload")
        payload = payload[1 : len(payload) - payload[0]]
    return payload[_PRIORITY_BYTES:] if flags & PRIORITISED else payload


@functools.lru_cache(maxsize=_KNOWN_BLOCKS)
def request_block(authority: str, path: str) -> bytes:
    """The headers of a gRPC request. None enters the other side's table: the block is the same whenever it is sent."""
    values = {":method": "POST", ":scheme": "http", ":path": path, ":authority": authority, "te": "trailers"}
    values |= {"content-type": "application/grpc", "user-agent": "triton-omni"}
    tuples = [hpack.NeverIndexedHeaderTuple(name.encode(), value.encode()) for name, value in values.items()]
    return bytes(hpack.Encoder().encode(tuples, huffman=False))


@functools.lru_cache(maxsize=_KNOWN_BLOCKS)
def read_block(block: bytes) -> Mapping[str, str]:
    """Headers of a server that was told to keep no table, so that a block means the same whenever it comes.

    Raises: ProtocolError.
    """
    try:
        return {str(name): str(value) for name, value in hpack.Decoder().decode(block)}
    except hpack.HPACKError as error:
        raise ProtocolError(f"headers that cannot be read: {error}") from error
