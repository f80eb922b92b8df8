"""A thinker without a model."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from triton_omni.errors import InvalidRequestError, NotFoundError, OmniError, RequestTimeoutError, StageError
from triton_omni.pipeline.null.checks import at_least
from triton_omni.pipeline.stages import (
    FinishReason,
    PromptRows,
    ThinkerEvent,
    ThinkerRequest,
    ThinkerSink,
    TokenLogprob,
)
from triton_omni.pipeline.timers import Timer, Timers
from triton_omni.tools import ToolCallDelta, ToolUse


@dataclasses.dataclass(frozen=True, slots=True)
class NullThinkerConfig:
    """``answer_tokens`` ids, the first after ``prefill_ms``, then one every ``token_ms``; ``prompt_tokens`` in all.
    With ``fail_at_token`` every answer ends with an error there.
    """

    token_ms: float = 10.0
    prefill_ms: float = 20.0
    answer_tokens: int = 40
    prompt_tokens: int = 32
    fail_at_token: int = 0

    def __post_init__(self) -> None:
        at_least(self, token_ms=0, prefill_ms=0, answer_tokens=0, prompt_tokens=1, fail_at_token=0)


@dataclasses.dataclass(slots=True, eq=False)
class _Answer:
    request: ThinkerRequest
    sink: ThinkerSink
    tokens: int
    text_tokens: int
    calls: list[ToolCallDelta]  # one per id behind the text's
    first_s: float
    sent: int = 0
    timer: Timer | None = None


class NullThinker:
    """ThinkerEngine: ids 1000, 1001, … with the texts "w0 ", "w1 ", …, ended by ``max_tokens`` if that is less. Each
    has the log probability -1; the alternatives are it, "x1 ", "x2 ", … with -1, -2, -3, …. Of the tools that may be
    called each is, behind the text or, where a call is asked for, instead of it; a call has three ids.
    """

    def __init__(self, config: NullThinkerConfig | None = None) -> None:
        self._config = config or NullThinkerConfig()
        self._timers = Timers("null-thinker")
        self._changed = threading.Condition()
        self._answers: dict[str, _Answer] = {}
        self._unfetched: dict[str, PromptRows] = {}
        self._closed = False

    def submit(self, request: ThinkerRequest, sink: ThinkerSink) -> None:
        """Start an answer. Errors go to the sink."""
        text_tokens = self._config.answer_tokens if request.tools is None or request.tools.choice == "auto" else 0
        calls = _calls(request.tools) if request.tools is not None else []
        tokens, limit = text_tokens + len(calls), request.sampling.max_tokens
        tokens = tokens if limit is None else min(limit, tokens)
        first_s = time.monotonic() + self._config.prefill_ms / 1e3
        answer = _Answer(request, sink, tokens, text_tokens, calls, first_s)
        with self._changed:
            refusal: OmniError | None = None
            if self._closed:
                refusal = StageError("thinker", "the engine is closed")
            elif request.request_id in self._answers:
                refusal = InvalidRequestError("request_id", f"{request.request_id!r} is already open")
            elif (request.sampling.response_format or {}).get("type", "text") != "text":
                refusal = InvalidRequestError("response_format.type", "must be 'text': the null engine has one answer")
            else:
                self._answers[request.request_id] = answer
        if refusal is not None:
            sink(refusal)
            return
        sink(ThinkerEvent(prompt_token_ids=np.arange(self._config.prompt_tokens, dtype=np.int32)))
        self._wait(answer)

    def rows(self, request_id: str, timeout_s: float) -> PromptRows:
        """Four rows of 8 float32, once, as soon as prefill is over. Raises NotFoundError or RequestTimeoutError."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: request_id in self._unfetched or request_id not in self._answers, timeout_s
            ):
                raise RequestTimeoutError(f"no rows of {request_id!r} within {timeout_s:g} s", field="thinker")
            if request_id not in self._unfetched:
                raise NotFoundError("request_id", f"no rows of {request_id!r}")
            return self._unfetched.pop(request_id)

    def abort(self, request_id: str) -> None:
        """End an answer with "cancelled" and forget its rows; unknown ones are left alone."""
        with self._changed:
            self._unfetched.pop(request_id, None)
        self._end(request_id, ThinkerEvent(finish_reason="cancelled"))

    def stats(self) -> dict[str, int]:
        """``running`` answers, ``waiting`` (always 0), ``unfetched_rows``."""
        with self._changed:
            return {"running": len(self._answers), "waiting": 0, "unfetched_rows": len(self._unfetched)}

    def close(self) -> None:
        """End every open answer with an error."""
        with self._changed:
            self._closed = True
            open_ids = list(self._answers)
        for request_id in open_ids:
            self._end(request_id, StageError("thinker", "the engine is closed"))
        self._timers.close()

    def _wait(self, answer: _Answer) -> None:
        due_s = answer.first_s + answer.sent * self._config.token_ms / 1e3
        with self._changed:
            if self._answers.get(answer.request.request_id) is answer:
                answer.timer = self._timers.call_at(due_s, lambda: self._advance(answer))

    def _advance(self, answer: _Answer) -> None:
        """Send all ids that are due."""
        request_id, first = answer.request.request_id, answer.sent
        late_ms = (time.monotonic() - answer.first_s) * 1e3
        token_ms = self._config.token_ms
        due = min(answer.tokens, 1 + int(late_ms / token_ms)) if token_ms else answer.tokens
        answer.sent = max(due, min(first + 1, answer.tokens))
        if 0 < self._config.fail_at_token <= answer.sent:
            self._end(request_id, StageError("thinker", f"failed at token {self._config.fail_at_token}, as told"))
            return
        if not first and answer.request.want_rows:
            self._make_rows(request_id)
        finish: FinishReason | None = None
        if answer.sent == answer.tokens:
            finish = "length" if answer.tokens < answer.text_tokens + len(answer.calls) else "stop"
        said, silent = min(answer.sent, answer.text_tokens), max(first, answer.text_tokens)
        event = ThinkerEvent(
            token_ids=np.arange(1000 + first, 1000 + said, dtype=np.int32),
            text="".join(f"w{i} " for i in range(first, said)),
            finish_reason=finish,
            logprobs=_logprobs(first, answer.sent, answer.request.sampling.logprobs),
            call_token_ids=np.arange(1000 + silent, 1000 + answer.sent, dtype=np.int32),
            tool_calls=tuple(answer.calls[silent - answer.text_tokens : max(answer.sent - answer.text_tokens, 0)]),
        )
        if finish is not None:
            self._end(request_id, event)
            return
        with self._changed:
            open_still = request_id in self._answers
        if open_still:
            answer.sink(event)
            self._wait(answer)

    def _make_rows(self, request_id: str) -> None:
        positions = np.tile(np.arange(self._config.prompt_tokens, dtype=np.int32), (3, 1))
        with self._changed:
            if request_id in self._answers:
                self._unfetched[request_id] = PromptRows(positions, np.zeros(4 * 8 * 4, np.uint8), "float32")
                self._changed.notify_all()

    def _end(self, request_id: str, last: ThinkerEvent | OmniError) -> None:
        with self._changed:
            answer = self._answers.pop(request_id, None)
            self._changed.notify_all()
        if answer is not None:
            if answer.timer is not None:
                answer.timer.cancel()
            answer.sink(last)


def _calls(tools: ToolUse) -> list[ToolCallDelta]:
    names = [tools.function] if tools.choice == "named" else [tool["function"]["name"] for tool in tools.tools]
    deltas: list[ToolCallDelta] = []
    for index, name in enumerate(names if tools.parallel else names[:1]):
        begin = {"name": name, "arguments": ""}
        deltas.append({"index": index, "id": f"call_{index}", "type": "function", "function": begin})
        deltas += [{"index": index, "function": {"arguments": piece}} for piece in ('{"n": ', f"{index}}}")]
    return deltas


def _logprobs(first: int, end: int, alternatives: int | None) -> tuple[TokenLogprob, ...]:
    if alternatives is None:
        return ()
    others = [_logprob(f"x{i} ", -1.0 - i) for i in range(1, alternatives)]
    own = [_logprob(f"w{i} ", -1.0) for i in range(first, end)]
    return tuple(entry | {"top_logprobs": [entry, *others] if alternatives else []} for entry in own)


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(token.encode()), "logprob": logprob}
