"""What one request gives its caller, and how the caller takes the request back."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from triton_omni.errors import OmniError, RequestCancelledError
from triton_omni.pipeline.stages import Int16

NO_SAMPLES: Int16 = np.empty(0, np.int16)


@dataclasses.dataclass(frozen=True, slots=True)
class OmniEvent:
    """One response of omni_bls: ``text`` delta, ``audio`` int16 [samples] at 24 kHz, and ``info``, its EVENT.

    ``info`` is ``{"type": "start", …}`` in the first event and ``{"type": "end", …}`` in the last. In plain deltas it
    is empty, but for text deltas of requests with ``continuous_usage``: ``{"usage": {"text_tokens": so far}}``, and of
    requests with ``thinker.logprobs``: ``{"logprobs": [one TokenLogprob per new token]}``. What is new of tool calls
    is in ``{"tool_calls": [ToolCallDelta]}``, beside text or alone.
    """

    text: str = ""
    audio: Int16 = dataclasses.field(default_factory=lambda: NO_SAMPLES)
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_end(self) -> bool:
        return self.info.get("type") == "end"

    @property
    def info_json(self) -> str:
        """EVENT as it crosses the wire."""
        return json.dumps(self.info, separators=(",", ":"))


Emit: TypeAlias = Callable[[OmniEvent | OmniError], None]
"""Takes the events of one request in order, never two at a time; must not block. The last call of a request is an
event with ``is_end`` or an OmniError, exactly one of the two."""


class CancelToken:
    """Lets the caller of a request end it. Thread-safe; only the first ``cancel`` counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: OmniError | None = None
        self._callback: Callable[[OmniError], None] | None = None

    @property
    def cancelled(self) -> bool:
        return self._error is not None

    def cancel(self, reason: str = "the client left") -> None:
        """End the request: its terminal event is a RequestCancelledError with ``reason``. Returns at once."""
        with self._lock:
            if self._error is not None:
                return
            self._error = RequestCancelledError(reason)
            callback = self._callback
        if callback is not None:
            callback(self._error)

    def on_cancel(self, callback: Callable[[OmniError], None] | None) -> None:
        """Call ``callback`` at the cancel, or now if it has been; None forgets the callback. The pipeline's."""
        with self._lock:
            self._callback = callback
            error = self._error
        if error is not None and callback is not None:
            callback(error)
