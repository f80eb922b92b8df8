"""Media in: the bytes of base64 strings, of data URLs and, where the operator allows it, of http(s) and file URLs.

What the bytes are is found out where they are decoded, by looking at them; names and declared types are not believed.
"""

from __future__ import annotations

import asyncio
import binascii
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from openai_frontend.fetch import Fetcher, FetchRules
from openai_frontend.local_files import LocalFiles
from openai_frontend.settings import Settings
from triton_omni.errors import InvalidRequestError

MediaKind = Literal["audio", "image", "video"]

_EXAMPLE: dict[MediaKind, str] = {
    "audio": "data:audio/wav;base64,…",
    "image": "data:image/png;base64,…",
    "video": "data:video/mp4;base64,…",
}

_REFUSED = {
    "http": "remote addresses are not fetched",
    "https": "remote addresses are not fetched",
    "file": "local files are not read",
}


def media_reader(settings: Settings) -> MediaReader:
    """By the operator's settings. Raises: ConfigError."""
    rules = FetchRules.of(settings.allowed_media_domains, settings.media_fetch_timeout_s)
    root = settings.allowed_local_media_path
    return MediaReader(Fetcher(rules), LocalFiles(Path(root)) if root else None)


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A file that must be got first; ``field`` is where the client named it."""

    url: str
    field: str


class Budget:
    """What the files of one request may have: bytes each, and bytes together."""

    def __init__(self, file_bytes: int, request_bytes: int) -> None:
        self.file_bytes, self.request_bytes = file_bytes, request_bytes
        self._sizes: dict[str, int] = {}

    def count(self, field: str, size: int) -> None:
        """The file at ``field`` has at least ``size`` bytes. Raises: InvalidRequestError naming it."""
        if size > self.file_bytes:
            raise InvalidRequestError(field, f"is larger than the {self.file_bytes} bytes a file may have")
        self._sizes[field] = size
        if sum(self._sizes.values()) > self.request_bytes:
            raise InvalidRequestError(
                field, f"is too much: the files of a request may have {self.request_bytes} bytes together"
            )


class MediaReader:
    """Reads what content parts point at. ``files``: None, and no file of this machine is read."""

    def __init__(self, fetcher: Fetcher, files: LocalFiles | None) -> None:
        self._fetcher, self._files = fetcher, files

    def from_url(self, url: str, kind: MediaKind, *, field: str, budget: Budget) -> bytes | Reference:
        """The bytes of a data URL, or a reference for ``load``. Raises InvalidRequestError naming ``field``."""
        scheme, colon, rest = url.partition(":")
        scheme = scheme.lower() if colon else ""
        if scheme == "data":
            return _from_data_url(rest, kind, field=field, budget=budget)
        if (scheme in ("http", "https") and self._fetcher.enabled) or (scheme == "file" and self._files is not None):
            return Reference(url, field)
        reason = _REFUSED.get(scheme, "is not a URL this server reads")
        raise InvalidRequestError(field, f"{reason}; send the file itself as a data URL ({_EXAMPLE[kind]})")

    async def load(self, media: Sequence[bytes | Reference], budget: Budget) -> list[bytes]:
        """The bytes of all of ``media``, fetched at once. Raises InvalidRequestError naming the field of one."""
        tasks = [asyncio.ensure_future(self._load(item, budget)) for item in media if isinstance(item, Reference)]
        try:
            loaded = iter(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        return [next(loaded) if isinstance(item, Reference) else item for item in media]

    async def _load(self, reference: Reference, budget: Budget) -> bytes:
        url, field = reference.url, reference.field
        if url[:5].lower() == "file:" and self._files is not None:
            content = await asyncio.to_thread(self._files.read, url, field=field, max_bytes=budget.file_bytes)
        else:
            content = await self._fetcher.fetch(url, field=field, count=lambda size: budget.count(field, size))
        budget.count(field, len(content))
        if not content:
            raise InvalidRequestError(field, "leads to an empty file")
        return content


def _from_data_url(rest: str, kind: MediaKind, *, field: str, budget: Budget) -> bytes:
    head, comma, data = rest.partition(",")
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    if not comma or "base64" not in parameters:
        raise InvalidRequestError(field, f"must be a base64 data URL ({_EXAMPLE[kind]})")
    # Sound alone is video/webm to some recorders, and application/ogg to some libraries.
    plausible = (f"{kind}/", "application/octet-stream", *(("video/", "application/ogg") if kind == "audio" else ()))
    if media_type and not media_type.startswith(plausible):
        raise InvalidRequestError(field, f"must hold {kind} ({_EXAMPLE[kind]}), got {media_type[:64]!r}")
    return from_base64(data, field=field, budget=budget)


def from_base64(data: str, *, field: str, budget: Budget) -> bytes:
    """The bytes of a base64 text. Raises InvalidRequestError naming ``field``."""
    budget.count(field, max(0, len(data) // 4 * 3 - 2))
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character beyond ASCII
        raise InvalidRequestError(field, f"must be base64: {error}") from None
    if not content:
        raise InvalidRequestError(field, "holds no data; send the base64 of a whole file")
    budget.count(field, len(content))
    return content
