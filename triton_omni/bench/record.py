"""What the client saw of one request."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """``sent_s`` and ``end_s`` by ``time.monotonic()``, which all processes of a machine share; every other time in
    seconds since ``sent_s``. ``late_s``: how long after its time the request was sent, by the client's own fault.

    ``text``: (arrival, tokens) of each piece of text; ``audio``: (arrival, seconds of sound) of each piece of speech.
    ``e2e_s``: arrival of the last event. ``text_tokens``: as the server counts them, which may be more than came as
    text. ``error``: None when the answer is complete and holds what was asked for.
    """

    sent_s: float
    end_s: float
    late_s: float = 0.0
    e2e_s: float = 0.0
    text: tuple[tuple[float, int], ...] = ()
    audio: tuple[tuple[float, float], ...] = ()
    prompt_tokens: int = 0
    text_tokens: int = 0
    error: str | None = None

    @property
    def audio_s(self) -> float:
        return sum(length_s for _, length_s in self.audio)


class Recorder:
    """Takes the pieces of one answer as they come. ``now_s``: seconds since the request was sent."""

    def __init__(self, sent_s: float, late_s: float = 0.0) -> None:
        self.sent_s = sent_s
        self.error: str | None = None
        self.ended = False
        self._late_s = late_s
        self._e2e_s = 0.0
        self._text: list[tuple[float, int]] = []
        self._audio: list[tuple[float, float]] = []
        self._counted = self._text_tokens = self._prompt_tokens = 0

    def event(self, now_s: float) -> None:
        self._e2e_s = now_s

    def text(self, now_s: float, tokens_so_far: int | None) -> None:
        """A piece of text; without a count it stands for one token. With one that has not grown it is no new token."""
        tokens = 1 if tokens_so_far is None else tokens_so_far - self._counted
        if tokens > 0:
            self._counted += tokens
            self._text.append((now_s, tokens))

    def audio(self, now_s: float, length_s: float) -> None:
        if length_s > 0:
            self._audio.append((now_s, length_s))

    def usage(self, prompt_tokens: int, text_tokens: int) -> None:
        self._prompt_tokens, self._text_tokens = prompt_tokens, text_tokens

    def fail(self, reason: str) -> None:
        """The first reason stays."""
        self.error = self.error or reason[:300]

    def close(self, end_s: float, *, wants_text: bool, wants_audio: bool) -> Record:
        if self.error is None and not self.ended:
            self.fail("the stream broke off before its end")
        if self.error is None and wants_audio and not self._audio:
            self.fail("no audio in the answer")
        if self.error is None and wants_text and not self._text:
            self.fail("no text in the answer")
        return Record(
            sent_s=self.sent_s,
            end_s=end_s,
            late_s=self._late_s,
            e2e_s=self._e2e_s,
            text=tuple(self._text),
            audio=tuple(self._audio),
            prompt_tokens=self._prompt_tokens,
            text_tokens=max(self._text_tokens, self._counted),
            error=self.error,
        )
