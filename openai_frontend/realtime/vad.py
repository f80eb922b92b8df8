"""When somebody speaks: silero-vad on onnxruntime, so that no torch is loaded here."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from openai_frontend.realtime.formats import Samples

RATE_HZ = 16_000
WINDOW_SAMPLES = 512  # 32 ms, what the model was trained on
_CONTEXT_SAMPLES = 64  # of the window before, which the model wants in front
_MODEL = Path(__file__).parent / "silero_vad" / "silero_vad_16k_op15.onnx"
# silero's own: once there is speech, less certainty keeps it going.
_HYSTERESIS = 0.15
# A click is no speech: this many windows in a row begin it.
START_WINDOWS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TurnRules:
    """``threshold``: probability of speech in a window; ``silence_ms`` of less end a turn; ``padding_ms`` before the
    first speech belong to it.
    """

    threshold: float
    padding_ms: int
    silence_ms: int


@cache
def _session() -> Any:
    import onnxruntime  # late: it costs 20 MB, and only who talks needs it

    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(_MODEL), options, providers=["CPUExecutionProvider"])


class SpeechProbability:
    """The model with the memory of one stream."""

    def __init__(self) -> None:
        self._state = np.zeros((2, 1, 128), np.float32)
        self._context = np.zeros(_CONTEXT_SAMPLES, np.float32)

    def of(self, window: Samples) -> float:
        """``window``: int16 [512] at 16 kHz, the one that follows."""
        scaled = window.astype(np.float32) / 32768
        inputs = {
            "input": np.concatenate([self._context, scaled])[None],
            "state": self._state,
            "sr": np.array(RATE_HZ, np.int64),
        }
        probability, self._state = _session().run(None, inputs)
        self._context = scaled[-_CONTEXT_SAMPLES:]
        return float(probability[0, 0])


class TurnDetector:
    """Turns of speech in a stream of windows. ``speaking``: within one."""

    def __init__(self, rules: TurnRules) -> None:
        self.speaking = False
        self._rules = rules
        self._probability = SpeechProbability()
        self._speech_windows = 0
        self._silent_samples = 0

    def changes(self, window: Samples) -> bool:
        """Whether a turn begins or ends with this window."""
        probability = self._probability.of(window)
        if not self.speaking:
            self._speech_windows = self._speech_windows + 1 if probability >= self._rules.threshold else 0
            if self._speech_windows < START_WINDOWS:
                return False
            self.speaking, self._silent_samples = True, 0
            return True
        if probability >= max(self._rules.threshold - _HYSTERESIS, 0.01):
            self._silent_samples = 0
            return False
        self._silent_samples += len(window)
        if self._silent_samples * 1000 < self._rules.silence_ms * RATE_HZ:
            return False
        self.end_turn()
        return True

    def end_turn(self) -> None:
        self.speaking, self._speech_windows = False, 0
