"""One request on its way through the engine."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection

import numpy as np

from triton_omni.errors import OmniError
from triton_omni.pipeline.stages import FinishReason, PromptRows, ThinkerEvent, ThinkerRequest, ThinkerSink
from triton_omni.thinker.answer import Answer, Piece
from triton_omni.thinker.sampler import Sampler
from triton_omni.thinker.transformers_model import KvState, PlacedPrompt


class Status(enum.Enum):
    PREPARING = enum.auto()  # a worker decodes media and makes the prompt
    WAITING = enum.auto()  # the prompt is ready
    RUNNING = enum.auto()  # prefill done
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True)
class Generation:
    """What a running request carries from token to token. ``end_ids``: EOS and stop ids."""

    kv: KvState
    sampler: Sampler
    answer: Answer
    end_ids: Collection[int]
    max_tokens: int
    last_id: int = -1
    num_tokens: int = 0

    def take(self, token_id: int) -> ThinkerEvent:
        """The event that the sampled id makes: what became certain, and the finish reason if it is the last."""
        self.last_id = token_id
        self.num_tokens += 1
        if token_id in self.end_ids:
            return _event(self.answer.finish(), "stop")
        piece = self.answer.push(token_id)
        if piece.stopped:
            return _event(piece, "stop")
        if self.num_tokens < self.max_tokens:
            return _event(piece, None)
        rest = self.answer.finish()
        whole = Piece(piece.token_ids + rest.token_ids, piece.text + rest.text)
        return _event(whole, "stop" if rest.stopped else "length")


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """``error``: why the prompt could not be made, or why the request ended."""

    request: ThinkerRequest
    sink: ThinkerSink
    status: Status = Status.PREPARING
    cancelled: bool = False
    prompt: PlacedPrompt | None = None
    error: OmniError | None = None
    generation: Generation | None = None
    rows: PromptRows | None = None
    rows_fetched: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id


def _event(piece: Piece, reason: FinishReason | None) -> ThinkerEvent:
    return ThinkerEvent(token_ids=np.array(piece.token_ids, np.int32), text=piece.text, finish_reason=reason)
