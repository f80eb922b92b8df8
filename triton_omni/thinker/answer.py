"""What may leave of an answer: sampled ids in, certain ids and certain text out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from triton_omni.pipeline.stages import NO_IDS, FinishReason, ThinkerEvent, TokenLogprob
from triton_omni.thinker.detokenizer import IncrementalDetokenizer
from triton_omni.thinker.stop import StopStrings
from triton_omni.thinker.tool_calls import Span, ToolCallParser
from triton_omni.tools import ToolCallDelta, joined


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """``token_ids`` and ``text`` that became certain; ``stopped``: the answer ends behind them. ``call_token_ids`` and
    ``tool_calls``: what became certain of calls. ``logprobs``: those that came with the ids.
    """

    token_ids: list[int]
    text: str
    stopped: bool = False
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    call_token_ids: list[int] = dataclasses.field(default_factory=list)
    tool_calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)

    def __add__(self, later: Piece) -> Piece:
        if self is NOTHING:
            return later
        return Piece(
            self.token_ids + later.token_ids,
            self.text + later.text,
            later.stopped,
            self.logprobs + later.logprobs,
            self.call_token_ids + later.call_token_ids,
            self.tool_calls + later.tool_calls,
        )

    def event(self, finish_reason: FinishReason | None) -> ThinkerEvent:
        """The piece as the engine sends it."""
        return ThinkerEvent(
            token_ids=np.array(self.token_ids, np.int32),
            text=self.text,
            finish_reason=finish_reason,
            logprobs=tuple(self.logprobs),
            call_token_ids=np.array(self.call_token_ids, np.int32) if self.call_token_ids else NO_IDS,
            tool_calls=joined(self.tool_calls) if self.tool_calls else (),
        )


NOTHING = Piece([], "")


class Answer:
    """One request's answer (EOS and stop ids are the caller's to leave out).

    Without stop strings and calls an id leaves at once. With them it leaves together with the first character of its
    text, so that when a stop string ends the answer, the ids given are exactly those with some text before it: a token
    that holds both (".\\n" with stop "\\n") is given and spoken, a token that lies wholly in the stop string is not.
    Stop strings are looked for only in text that begins after the first ``min_tokens`` ids, and not in calls. With
    ``calls`` an id is the text's or a call's as the first character of its text is.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        special_ids: Collection[int],
        stop: Sequence[str],
        min_tokens: int,
        calls: ToolCallParser | None = None,
    ) -> None:
        self._text = IncrementalDetokenizer(decode, special_ids)
        self._stop = StopStrings(stop)
        self._calls = calls
        self._waits_for_text = bool(stop) or calls is not None
        self._min_tokens = min_tokens
        self._pending: deque[_Pending] = deque()
        self._num_tokens = 0
        self._known_chars = 0
        self._given_chars = 0
        self._after_call = False

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """The next sampled id."""
        if not self._waits_for_text:
            return Piece([token_id], self._text.push(token_id), logprobs=[] if logprob is None else [logprob])
        self._num_tokens += 1
        self._pending.append(_Pending(token_id, self._known_chars, logprob))
        return self._leave(self._text.push(token_id))

    def finish(self, *, cut: bool = False) -> Piece:
        """The rest, when the answer ends other than by a stop string; ``cut``: by a limit."""
        last = self._leave(self._text.flush())
        if last.stopped:
            return last
        if self._calls is not None:
            last += self._leave_spans(self._calls.finish(cut=cut))
            if last.stopped:
                return last
        rest = self._piece(len(self._pending), self._stop.flush())
        return last + (_silent(rest) if self._after_call else rest)

    def _leave(self, text: str) -> Piece:
        self._known_chars += len(text)
        if self._calls is None:
            return self._leave_text(text)
        piece = self._leave_spans(self._calls.push(text))
        return dataclasses.replace(piece, stopped=piece.stopped or self._calls.done)

    def _leave_spans(self, spans: Iterable[Span]) -> Piece:
        piece = Piece([], "")
        for span in spans:
            if span.text:
                piece += self._leave_text(span.text)
                if piece.stopped:
                    break
            else:
                piece += self._leave_call(span)
        return piece

    def _leave_text(self, text: str) -> Piece:
        shown, stopped = self._stop.push(text, search=self._num_tokens > self._min_tokens)
        self._given_chars += len(shown)
        self._after_call = self._after_call and not shown
        return self._piece(self._num_given(), shown, stopped)

    def _leave_call(self, span: Span) -> Piece:
        text = self._stop.flush()
        self._given_chars += len(text)
        before = self._piece(self._num_given(), text)
        self._given_chars += span.num_chars
        self._after_call = True
        own = _silent(self._piece(self._num_given(), ""))
        return before + (dataclasses.replace(own, tool_calls=[span.call]) if span.call is not None else own)

    def _num_given(self) -> int:
        """How many of the ids that wait may leave."""
        return sum(each.begins < self._given_chars for each in self._pending)

    def _piece(self, num_ids: int, text: str, stopped: bool = False) -> Piece:
        """With the first ``num_ids`` that wait."""
        leaving = [self._pending.popleft() for _ in range(num_ids)]
        logprobs = [each.logprob for each in leaving if each.logprob is not None]
        return Piece([each.token_id for each in leaving], text, stopped, logprobs)


def _silent(piece: Piece) -> Piece:
    """Its ids are a call's."""
    return dataclasses.replace(piece, token_ids=[], call_token_ids=piece.token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """``begins``: where its text begins, in characters."""

    token_id: int
    begins: int
    logprob: TokenLogprob | None
