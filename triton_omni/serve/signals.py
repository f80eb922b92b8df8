"""SIGINT, SIGTERM and SIGHUP as an exception that arises only where it can be handled."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Somebody wants this process to end. Not an Exception: nothing on the way should take it for an error."""


class StopSignals:
    """While entered, a stop signal raises StopRequested inside ``interruptible()``, elsewhere at the next one.

    So a signal never falls between the start of a child and the line that notes it down.
    """

    def __init__(self) -> None:
        self._requested = False
        self._interruptible = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raises StopRequested at once when a signal came before, and in its body when one comes."""
        self._interruptible = True
        try:
            if self._requested:
                raise StopRequested
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._interruptible:
            self._interruptible = False
            raise StopRequested
