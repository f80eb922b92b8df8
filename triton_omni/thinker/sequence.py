"""One request on its way through the engine."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection

from triton_omni.errors import OmniError
from triton_omni.pipeline.stages import ThinkerEvent, ThinkerRequest, ThinkerSink, TokenLogprob
from triton_omni.thinker.answer import Answer
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

    def take(self, token_id: int, logprob: TokenLogprob | None = None) -> ThinkerEvent:
        """The event that the sampled id makes: what became certain, and the finish reason if it is the last."""
        self.last_id = token_id
        self.num_tokens += 1
        if token_id in self.end_ids:
            return self.answer.finish().event("stop")
        piece = self.answer.push(token_id, logprob)
        if piece.stopped:
            return piece.event("stop")
        if self.num_tokens < self.max_tokens:
            return piece.event(None)
        whole = piece + self.answer.finish(cut=True)
        return whole.event("stop" if whole.stopped else "length")


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """``error``: why the prompt could not be made."""

    request: ThinkerRequest
    sink: ThinkerSink
    status: Status = Status.PREPARING
    cancelled: bool = False
    prompt: PlacedPrompt | None = None
    error: OmniError | None = None
    generation: Generation | None = None

    @property
    def id(self) -> str:
        return self.request.request_id
