"""What one request has got so far: usage, timings and how its answer ended."""

from __future__ import annotations

import time
from typing import Any

from triton_omni.pipeline.stages import FinishReason, ThinkerEvent


class Progress:
    """Counts and first times of one request; clocks start when it is made."""

    __slots__ = (
        "_started_s",
        "_tools_called",
        "audio_frames",
        "audio_samples",
        "first_audio_ms",
        "first_text_ms",
        "prompt_tokens",
        "spoken_tokens",
        "talker_finish",
        "text_tokens",
        "thinker_finish",
    )

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.prompt_tokens = 0
        self.text_tokens = 0
        self.spoken_tokens = 0
        self._tools_called = False
        self.audio_frames = 0
        self.audio_samples = 0
        self.first_text_ms: float | None = None
        self.first_audio_ms: float | None = None
        self.thinker_finish: FinishReason | None = None
        self.talker_finish: FinishReason | None = None

    def add_tokens(self, event: ThinkerEvent) -> None:
        self.text_tokens += event.token_ids.size + event.call_token_ids.size
        self.spoken_tokens += event.token_ids.size
        self._tools_called |= bool(event.tool_calls)

    def add_text(self) -> None:
        if self.first_text_ms is None:
            self.first_text_ms = self._elapsed_ms()

    def add_audio(self, frames: int, samples: int) -> None:
        self.audio_frames += frames
        self.audio_samples += samples
        if samples and self.first_audio_ms is None:
            self.first_audio_ms = self._elapsed_ms()

    def start_info(self, request_id: str) -> dict[str, Any]:
        """EVENT of the first response."""
        return {"type": "start", "request_id": request_id, "usage": {"prompt_tokens": self.prompt_tokens}}

    def end_info(self) -> dict[str, Any]:
        """EVENT of the last response. ``finish_reason`` is "length" when text, a call or speech was cut by its limit,
        else "tool_calls" when there were any; ``completion_tokens`` counts text tokens, those of calls included, and
        codec frames (OpenAI's audio tokens)."""
        cut = "length" in (self.thinker_finish, self.talker_finish)
        ended = "tool_calls" if self._tools_called else "stop"
        return {
            "type": "end",
            "finish_reason": "length" if cut else ended,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.text_tokens + self.audio_frames,
                "text_tokens": self.text_tokens,
                "audio_frames": self.audio_frames,
                "audio_samples": self.audio_samples,
            },
            "timings_ms": {
                "first_text": self.first_text_ms,
                "first_audio": self.first_audio_ms,
                "total": self._elapsed_ms(),
            },
        }

    def _elapsed_ms(self) -> float:
        return round((time.monotonic() - self._started_s) * 1e3, 2)
