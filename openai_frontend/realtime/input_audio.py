"""The input audio buffer: raw samples in, turns of speech out."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from openai_frontend.realtime.formats import PCM16_24K, Resampler, Samples, WireFormat
from openai_frontend.realtime.vad import RATE_HZ, START_WINDOWS, WINDOW_SAMPLES, TurnDetector, TurnRules
from triton_omni.errors import InvalidRequestError

_NOTHING = np.zeros(0, np.int16)


@dataclasses.dataclass(frozen=True, slots=True)
class SpeechStarted:
    """``start_ms``: of the audio of this session, padding included."""

    start_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class SpeechStopped:
    """``samples``: int16 [N] at 16 kHz, the turn with its padding and the silence that ended it."""

    end_ms: int
    samples: Samples


class InputAudio:
    """Holds at most ``max_samples`` at 16 kHz. With rules for turns it keeps, between turns, only their padding."""

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._format = PCM16_24K
        self._rules: TurnRules | None = None
        self._detector: TurnDetector | None = None
        self._pieces: deque[Samples] = deque()
        self._pieces_samples = 0
        self._end_samples = 0  # of the session, where the buffer ends
        self._resampler = Resampler(self._format.rate_hz, RATE_HZ)
        self._pending = _NOTHING
        self._cut_sample = b""

    @property
    def speaking(self) -> bool:
        return self._detector is not None and self._detector.speaking

    def configure(self, wire_format: WireFormat, rules: TurnRules | None) -> None:
        if wire_format != self._format:
            self._format = wire_format
            self._start_over()
        if rules != self._rules:
            self._rules, self._detector = rules, TurnDetector(rules) if rules else None

    def append(self, data: bytes) -> list[SpeechStarted | SpeechStopped]:
        """Takes raw samples in the wire's format; a sample may be cut in two.

        Raises: InvalidRequestError when the buffer is full; it is empty then.
        """
        data = self._cut_sample + data
        whole = len(data) - len(data) % self._format.sample_bytes
        self._cut_sample = data[whole:]
        samples = self._resampler.push(self._format.decode(data[:whole]))
        if self._pieces_samples + len(self._pending) + len(samples) > self._max_samples:
            self.clear()
            limit_s = self._max_samples // RATE_HZ
            raise InvalidRequestError("audio", f"the buffer would hold more than {limit_s} s; it has been cleared")
        if self._detector is None or self._rules is None:
            self._keep(samples)
            return []
        return self._windows(self._detector, self._rules, samples)

    def _windows(
        self, detector: TurnDetector, rules: TurnRules, samples: Samples
    ) -> list[SpeechStarted | SpeechStopped]:
        found: list[SpeechStarted | SpeechStopped] = []
        self._pending = np.concatenate([self._pending, samples])
        while len(self._pending) >= WINDOW_SAMPLES:
            window, self._pending = self._pending[:WINDOW_SAMPLES], self._pending[WINDOW_SAMPLES:]
            self._keep(window)
            changed = detector.changes(window)
            if not detector.speaking and not changed:
                self._trim(rules)
            elif detector.speaking and changed:
                self._trim(rules)
                found.append(SpeechStarted(_ms(self._end_samples - self._pieces_samples)))
            elif changed:
                found.append(SpeechStopped(_ms(self._end_samples), self._emptied()))
        return found

    def take(self) -> Samples:
        """All there is, int16 at 16 kHz; the buffer is empty then."""
        self._keep(self._pending)
        self._keep(self._resampler.push(_NOTHING, last=True))
        self._start_over()
        if self._detector is not None:
            self._detector.end_turn()
        return self._emptied()

    def clear(self) -> None:
        self.take()

    def _start_over(self) -> None:
        """Forget what waits for more: half a sample, the filter's tail, a part of a window."""
        self._resampler = Resampler(self._format.rate_hz, RATE_HZ)
        self._pending = _NOTHING
        self._cut_sample = b""

    def _keep(self, samples: Samples) -> None:
        if len(samples):
            self._pieces.append(samples)
            self._pieces_samples += len(samples)
            self._end_samples += len(samples)

    def _trim(self, rules: TurnRules) -> None:
        """To the padding and the windows that may turn out to be speech."""
        surplus = self._pieces_samples - rules.padding_ms * RATE_HZ // 1000 - START_WINDOWS * WINDOW_SAMPLES
        while surplus > 0:
            first = self._pieces.popleft()
            if len(first) > surplus:
                self._pieces.appendleft(first[surplus:])
            removed = min(len(first), surplus)
            self._pieces_samples -= removed
            surplus -= removed

    def _emptied(self) -> Samples:
        samples = np.concatenate(self._pieces) if self._pieces else _NOTHING
        self._pieces.clear()
        self._pieces_samples = 0
        return samples


def _ms(samples: int) -> int:
    return samples * 1000 // RATE_HZ
