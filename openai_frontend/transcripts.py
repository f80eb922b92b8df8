"""What former answers said, by the id of their audio: a conversation can name an answer instead of repeating it.

Kept for a while, and never more than a bound: the oldest leave first. All workers of one frontend share a file, which
goes with them; a single one keeps everything in memory.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from openai_frontend.engine import Delta
from openai_frontend.metrics import SHARED_DIRECTORY_VARIABLE

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 32 * 2**20
# A worker holds the file for less than a millisecond; who waits for so long waits for one that hangs.
_LOCK_TIMEOUT_S = 1.0
# Nothing outlives the frontend, so nothing is synced. The triggers keep the sum, else a scan at every answer.
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS transcripts (
    place INTEGER PRIMARY KEY, id TEXT UNIQUE, end_s REAL NOT NULL, weight INTEGER NOT NULL, said TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS total (weight INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON transcripts
    BEGIN UPDATE total SET weight = weight + new.weight; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON transcripts
    BEGIN UPDATE total SET weight = weight - old.weight; END;
COMMIT;
"""


class Transcripts:
    """``lifetime_s``: how long a transcript can be named; ``max_characters`` bounds all of them together. ``file``:
    None keeps them in this process. ``clock``: the same for all that share the file.
    """

    def __init__(
        self,
        lifetime_s: float,
        *,
        file: Path | None = None,
        max_characters: int = MAX_CHARACTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifetime_s, self._max_characters, self._clock = lifetime_s, max_characters, clock
        self._db = sqlite3.connect(
            file or ":memory:", timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._db.executescript(_SCHEMA)

    @classmethod
    def of_all_workers(cls, lifetime_s: float) -> Transcripts:
        """Shared with the other workers of this frontend, where there are some."""
        directory = os.environ.get(SHARED_DIRECTORY_VARIABLE)
        return cls(lifetime_s, file=Path(directory) / "transcripts.sqlite" if directory else None)

    def put(self, audio_id: str, transcript: str) -> None:
        """Keeps the transcript of a new id; where that fails the log says so, and the id will not be known."""
        row = (audio_id, self._clock() + self._lifetime_s, _weight(transcript), transcript)
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute("INSERT OR IGNORE INTO transcripts (id, end_s, weight, said) VALUES (?, ?, ?, ?)", row)
                self._remove_oldest()
        except sqlite3.Error as error:
            logger.warning("the transcript of %s is not kept: %s", audio_id, error)

    def _remove_oldest(self) -> None:
        """All have the same lifetime: the first that came is the first to end."""
        while True:
            (total,) = self._db.execute("SELECT weight FROM total").fetchone()
            oldest = self._db.execute("SELECT place, end_s FROM transcripts ORDER BY place LIMIT 1").fetchone()
            if oldest is None or (oldest[1] > self._clock() and total <= self._max_characters):
                return
            self._db.execute("DELETE FROM transcripts WHERE place = ?", oldest[:1])

    def get(self, audio_id: str) -> str | None:
        """None: not known, or no longer."""
        query = "SELECT said FROM transcripts WHERE id = ? AND end_s > ?"
        row = self._db.execute(query, (audio_id, self._clock())).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        self._db.close()

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
