"""Token ids to text, piece by piece, never splitting a character."""

from __future__ import annotations

from collections.abc import Callable, Collection

REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 8


class IncrementalDetokenizer:
    """For byte-level tokenizers. The pieces together equal ``decode`` of all ids, whatever bytes they hold.

    The decoder writes an unfinished UTF-8 character as one trailing U+FFFD, so everything before a trailing U+FFFD is
    certain and leaves at once; the rest waits for the next id, or for ``flush``. Only the ids since the last certain
    character are decoded again (``_WINDOW_TOKENS`` or so when the bytes are no UTF-8 at all).
    """

    def __init__(self, decode: Callable[[list[int]], str], special_ids: Collection[int]) -> None:
        self._decode = decode
        self._special_ids = special_ids
        self._window: list[int] = []
        self._given_chars = 0  # of the window's text

    def push(self, token_id: int) -> str:
        """The text that became certain with this id. Special tokens have none."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.removesuffix(REPLACEMENT)
        piece = certain[self._given_chars :]
        if certain == text:
            self._window, self._given_chars = [], 0
        else:
            self._given_chars = len(certain)
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """What was held back: an unfinished character as U+FFFD."""
        piece = self._decode(self._window)[self._given_chars :]
        self._window, self._given_chars = [], 0
        return piece

    def _shorten(self, text: str) -> None:
        if len(self._window) <= _WINDOW_TOKENS:
            return
        half = len(self._window) // 2
        head, tail = self._decode(self._window[:half]), self._decode(self._window[half:])
        # Where both halves decode to the whole, no character spans the cut, and with text behind it none ever will.
        if tail and head + tail == text:
            self._window = self._window[half:]
            self._given_chars -= len(head)
