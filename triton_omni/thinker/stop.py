"""Stop strings in a stream of text: never shown, also when they arrive in several pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through, holding back what could be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str, *, search: bool = True) -> tuple[str, bool]:
        """(text that may leave, whether a stop string was found right behind it). ``search`` False lets all pass."""
        text, self._held = self._held + text, ""
        if not search or not self._stop:
            return text, False
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            return text[: min(found)], True
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
