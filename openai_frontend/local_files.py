"""Media in files of this machine, under one directory that the operator names."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from triton_omni.errors import ConfigError, InvalidRequestError


class LocalFiles:
    """Reads files below ``root``; links are followed first, and only what they lead to counts. Raises: ConfigError."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(f"{root} is no directory", field="allowed_local_media_path")
        self.root = root.resolve()

    def read(self, url: str, *, field: str, max_bytes: int) -> bytes:
        """The file of a ``file:`` URL, one byte more than ``max_bytes`` at most. What is outside, missing and no plain
        file is told apart to nobody. Raises: InvalidRequestError naming ``field``.
        """
        refusal = InvalidRequestError(field, "is no readable file in the directory that this server reads media from")
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise refusal
            path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
            if not path.is_relative_to(self.root):
                raise refusal
            # O_NONBLOCK: a pipe must not hold us up. What was opened is looked at again: a link may have changed.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                opened = Path(os.path.realpath(f"/proc/self/fd/{file.fileno()}"))
                if not opened.is_relative_to(self.root) or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refusal
                return file.read(max_bytes + 1)
        except (OSError, ValueError, RuntimeError):  # RuntimeError: links that lead in a circle
            raise refusal from None
