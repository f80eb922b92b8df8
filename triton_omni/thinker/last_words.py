"""Why vLLM's process ended: the last error that it logged. The process that started it hears only that it is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "TRITON_OMNI_LAST_WORDS"
_LOGGER = "vllm"
_MAX_CHARS = 240


@contextlib.contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile keep theirs in this file, once they call ``keep``."""
    os.environ[_VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def keep() -> None:
    """From here on, each exception that vLLM logs in this process replaces what the file says."""
    if path := os.environ.get(_VARIABLE):
        logging.getLogger(_LOGGER).addHandler(_Keeper(Path(path)))


def read(path: Path) -> str:
    """The exception's type and message on one line; "" when there was none."""
    try:
        return textwrap.shorten(path.read_text(), _MAX_CHARS, placeholder=" …")
    except OSError:
        return ""


class _Keeper(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError):
                self._path.write_text(f"{type(error).__name__}: {error}")
