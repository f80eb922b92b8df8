"""API keys: where they come from, and whether one of them was sent."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from triton_omni.errors import ConfigError

VARIABLE = "OMNI_API_KEYS"


def load(path: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of a file (one a line) and of the environment (separated by commas), each once.

    Raises: ConfigError when the file cannot be read or holds none, and on a key that no header can carry.
    """
    found: list[str] = []
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", field="api_keys_file") from None
        found = _checked([line for line in lines if not line.startswith("#")], "api_keys_file")
        if not found:
            raise ConfigError(f"{path} holds no key; write one a line", field="api_keys_file")
    found += _checked(environment.get(VARIABLE, "").split(","), VARIABLE)
    return tuple(dict.fromkeys(found))


def _checked(texts: list[str], where: str) -> list[str]:
    keys = [key for text in texts if (key := text.strip())]
    for number, key in enumerate(keys, start=1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"key {number} holds a space or a character beyond printable ASCII", field=where)
    return keys


class KeyRing:
    """Compares in a time that tells nothing of the keys: digests of one length, always all of them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, key: str) -> str | None:
        """A name for the key that does not give it away; None when it is none of ours."""
        sent, found = _digest(key), None
        for digest in self._digests:
            if hmac.compare_digest(digest, sent):
                found = digest.hex()[:16]
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
