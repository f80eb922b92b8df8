"""One speech session: the text it still has to say, the frames it has not handed out yet, where it stands."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from triton_omni.errors import OmniError
from triton_omni.pipeline.chunk_policy import ChunkBorders
from triton_omni.pipeline.stages import CodesEvent, FinishReason, Int32, TalkerSink
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.prefill import Prefill
from triton_omni.talker.runner import Prompt
from triton_omni.talker.shape import TextIds


class Phase(enum.Enum):
    """WAITING for a slot, PREFILL, SPEAKING when there is text, ENDED (and forgotten by all but steps in flight)."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    SPEAKING = enum.auto()
    ENDED = enum.auto()


class Text:
    """The tokens to be spoken, as they arrive: answer tokens, one tts_eos, then tts_pad for ever."""

    def __init__(self, ids: TextIds) -> None:
        self._after = (ids.tts_eos, ids.tts_pad)
        self._ids: list[int] = []
        self._taken = 0
        self.finished = False

    def append(self, token_ids: list[int], finished: bool) -> None:
        self._ids += token_ids
        self.finished = self.finished or finished

    @property
    def is_empty(self) -> bool:
        return not self._ids

    @property
    def has_next(self) -> bool:
        """False while the next token has not arrived. A late token is waited for, never replaced by pad."""
        return self._taken < len(self._ids) or self.finished

    def take(self) -> int:
        """The next token. Only when ``has_next``."""
        index, self._taken = self._taken, self._taken + 1
        if index < len(self._ids):
            return self._ids[index]
        return self._after[0] if index == len(self._ids) else self._after[1]


class Chunks:
    """Collects frames and hands them out at the borders."""

    def __init__(self, borders: ChunkBorders, groups: int) -> None:
        self._borders, self._groups = borders, groups
        self._frames: list[Int32] = []

    def add(self, frame: Int32) -> None:
        self._frames.append(frame)

    def at_border(self) -> bool:
        """Whether a chunk leaves with the frame that was added last."""
        return self._borders.is_complete(len(self._frames))

    def is_ahead(self) -> bool:
        """Whether the next chunk will leave before the player runs dry, as far as the last frame's time tells."""
        return self._borders.is_ahead(len(self._frames))

    def clear(self) -> None:
        self._frames = []

    def take(self) -> Int32:
        """int32 [frames, groups], all that have come together."""
        frames, self._frames = self._frames, []
        self._borders.leave(len(frames))
        return np.stack(frames) if frames else np.empty((0, self._groups), np.int32)


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """``prefill`` None: nothing to answer; ``prompt``: its rows while they are computed; ``rows``: rows of its slot
    that are computed or in flight; ``frames``: codec frames that have come back; ``failure``: why it ends.
    """

    session_id: str
    sink: TalkerSink
    sampling: TalkerSampling
    seed: int
    text: Text
    chunks: Chunks
    prefill: Prefill | None
    prompt: Prompt | None = None
    phase: Phase = Phase.WAITING
    slot: int = -1
    rows: int = 0
    frames: int = 0
    failure: OmniError | None = None
    cancelled: bool = False

    @property
    def is_silent(self) -> bool:
        """Nothing to say: no user message, or an answer without a token."""
        return self.prefill is None or (self.text.is_empty and self.text.finished)

    @property
    def has_begun(self) -> bool:
        """Whether any of its text is there, or will never be."""
        return self.text.finished or not self.text.is_empty

    def give_slot_back(self) -> None:
        """Wait for another one, from the first row on. Only before it ``has_begun``."""
        self.phase, self.slot, self.rows, self.prompt = Phase.WAITING, -1, 0, None

    def can_speak(self, max_context: int) -> bool:
        """Whether another frame may be launched: its text is there, and no limit known beforehand is reached."""
        return self.phase is Phase.SPEAKING and self.text.has_next and self.rows < self._last_row(max_context)

    def _last_row(self, max_context: int) -> int:
        assert self.prefill is not None
        return min(max_context, self.prefill.rows + self.sampling.max_frames)

    def early_end(self) -> CodesEvent | OmniError | None:
        """What ends the session now, whatever its frames are."""
        if self.failure is not None:
            return self.failure
        if self.cancelled:
            self.chunks.clear()
            return self.last_event("cancelled")
        if self.is_silent:
            return self.last_event("stop")
        return None

    def add_frame(self, codes: Int32, eos: int, max_context: int) -> CodesEvent | None:
        """Take one frame [groups]; the event that is due with it, if any."""
        if codes[0] == eos:
            return self.last_event("stop")
        self.chunks.add(codes)
        self.frames += 1
        assert self.prefill is not None
        if self.prefill.rows + self.frames == self._last_row(max_context):
            return self.last_event("length")
        return CodesEvent(self.chunks.take()) if self.chunks.at_border() else None

    def last_event(self, reason: FinishReason) -> CodesEvent:
        return CodesEvent(self.chunks.take(), reason)
