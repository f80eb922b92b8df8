"""What may leave of an answer: sampled ids in, certain ids and certain text out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Sequence

from triton_omni.thinker.detokenizer import IncrementalDetokenizer
from triton_omni.thinker.stop import StopStrings


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """``token_ids`` and ``text`` that became certain; ``stopped``: a stop string came right behind the text."""

    token_ids: list[int]
    text: str
    stopped: bool = False


class Answer:
    """One request's answer (EOS and stop ids are the caller's to leave out).

    Without stop strings an id leaves at once. With them it leaves together with the first character of its text, so
    that when a stop string ends the answer, the ids given are exactly those with some text before it: a token that
    holds both (".\\n" with stop "\\n") is given and spoken, a token that lies wholly in the stop string is not.
    Stop strings are looked for only in text that begins after the first ``min_tokens`` ids.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], special_ids: Collection[int], stop: Sequence[str], min_tokens: int
    ) -> None:
        self._text = IncrementalDetokenizer(decode, special_ids)
        self._stop = StopStrings(stop)
        self._waits_for_text = bool(stop)
        self._min_tokens = min_tokens
        self._pending: deque[tuple[int, int]] = deque()  # (id, where its text begins, in characters)
        self._num_tokens = 0
        self._known_chars = 0
        self._given_chars = 0

    def push(self, token_id: int) -> Piece:
        """The next sampled id."""
        self._num_tokens += 1
        self._pending.append((token_id, self._known_chars))
        return self._leave(self._text.push(token_id))

    def finish(self) -> Piece:
        """The rest, when the answer ends other than by a stop string."""
        last = self._leave(self._text.flush())
        if last.stopped:
            return last
        ids = last.token_ids + [token_id for token_id, _ in self._pending]
        self._pending.clear()
        return Piece(ids, last.text + self._stop.flush())

    def _leave(self, text: str) -> Piece:
        self._known_chars += len(text)
        shown, stopped = self._stop.push(text, search=self._num_tokens > self._min_tokens)
        self._given_chars += len(shown)
        ids: list[int] = []
        while self._pending and (not self._waits_for_text or self._pending[0][1] < self._given_chars):
            ids.append(self._pending.popleft()[0])
        return Piece(ids, shown, stopped)
