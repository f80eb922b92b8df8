"""Media in: the bytes of data URLs and of base64 strings. Nothing is fetched and no file is read."""

from __future__ import annotations

import binascii
from typing import Literal

from triton_omni.errors import InvalidRequestError

MediaKind = Literal["audio", "image"]

_EXAMPLE: dict[MediaKind, str] = {"audio": "data:audio/wav;base64,…", "image": "data:image/png;base64,…"}
_REFUSED = {
    "http": "remote addresses are not fetched",
    "https": "remote addresses are not fetched",
    "file": "local files are not read",
}


def from_url(url: str, kind: MediaKind, *, field: str, max_bytes: int) -> bytes:
    """The bytes of a ``data:`` URL of ``kind``. Raises InvalidRequestError naming ``field``."""
    scheme, colon, rest = url.partition(":")
    scheme = scheme.lower() if colon else ""
    if scheme != "data":
        reason = _REFUSED.get(scheme, "is not a URL this server reads")
        raise InvalidRequestError(field, f"{reason}; send the file itself as a data URL ({_EXAMPLE[kind]})")
    head, comma, data = rest.partition(",")
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    if not comma or "base64" not in parameters:
        raise InvalidRequestError(field, f"must be a base64 data URL ({_EXAMPLE[kind]})")
    if media_type and not media_type.startswith((f"{kind}/", "application/octet-stream")):
        raise InvalidRequestError(field, f"must hold {kind} ({_EXAMPLE[kind]}), got {media_type[:64]!r}")
    return from_base64(data, field=field, max_bytes=max_bytes)


def from_base64(data: str, *, field: str, max_bytes: int) -> bytes:
    """The bytes of a base64 text. Raises InvalidRequestError naming ``field``."""
    if len(data) // 4 * 3 > max_bytes + 2:
        raise InvalidRequestError(field, f"is larger than the {max_bytes} bytes a file may have")
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character beyond ASCII
        raise InvalidRequestError(field, f"must be base64: {error}") from None
    if not content:
        raise InvalidRequestError(field, "holds no data; send the base64 of a whole file")
    if len(content) > max_bytes:
        raise InvalidRequestError(field, f"is larger than the {max_bytes} bytes a file may have")
    return content
