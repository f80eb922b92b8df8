"""What former answers said, by the id of their audio: a conversation can name an answer instead of repeating it.

Kept in this process only, for a while, and never more than a bound: the oldest leave first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from openai_frontend.engine import Delta

MAX_CHARACTERS = 32 * 2**20


class Transcripts:
    """``lifetime_s``: how long a transcript can be named; ``max_characters`` bounds all of them together."""

    def __init__(
        self, lifetime_s: float, *, max_characters: int = MAX_CHARACTERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lifetime_s, self._max_characters, self._clock = lifetime_s, max_characters, clock
        self._entries: OrderedDict[str, tuple[float, str]] = OrderedDict()  # id -> (end of life, transcript)
        self._characters = 0

    def put(self, audio_id: str, transcript: str) -> None:
        """Keeps the transcript of a new id."""
        self._entries[audio_id] = (self._clock() + self._lifetime_s, transcript)
        self._characters += _weight(transcript)
        while self._entries:
            oldest, (end, text) = next(iter(self._entries.items()))
            if end > self._clock() and self._characters <= self._max_characters:
                return
            del self._entries[oldest]
            self._characters -= _weight(text)

    def get(self, audio_id: str) -> str | None:
        """None: not known, or no longer."""
        end, transcript = self._entries.get(audio_id, (0.0, ""))
        return transcript if end > self._clock() else None

    async def recorded(self, pieces: AsyncGenerator[Delta, None], audio_id: str) -> AsyncGenerator[Delta, None]:
        """``pieces``, their text kept before the last one is passed on, or as far as it came."""
        said: list[str] = []
        kept = False
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    said.append(piece.text)
                    if piece.event.get("type") == "end":
                        self.put(audio_id, "".join(said))
                        kept = True
                    yield piece
        finally:
            if said and not kept:
                self.put(audio_id, "".join(said))


def _weight(transcript: str) -> int:
    """Characters, and something for the entry itself."""
    return len(transcript) + 256
