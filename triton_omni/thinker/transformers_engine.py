"""Continuous batching over text requests on transformers: one thread, one step loop."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from triton_omni.device import is_lost
from triton_omni.errors import OmniError, StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import PromptRows, ThinkerEvent, ThinkerRequest, ThinkerSink, TokenLogprob
from triton_omni.thinker.admission import Admission
from triton_omni.thinker.answer import Answer
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.constraint import check_unconstrained
from triton_omni.thinker.limits import (
    check_prompt_tokens,
    check_token_ids,
    context_tokens,
    eos_token_ids,
    max_answer_tokens,
)
from triton_omni.thinker.logprobs import LogprobWriter
from triton_omni.thinker.prompt import PromptBuilder
from triton_omni.thinker.rows_shelf import RowsShelf
from triton_omni.thinker.sampler import Sampler
from triton_omni.thinker.sequence import Generation, Sequence, Status
from triton_omni.thinker.tool_calls import ToolCallParser
from triton_omni.thinker.transformers_model import TransformersModel

log = logging.getLogger(__name__)
STAGE = "thinker"


class TransformersThinker:
    """A ThinkerEngine (see ``pipeline.stages``).

    Worker threads make the prompts. The engine's thread runs steps: end what was cancelled, welcome new prompts,
    prefill one, decode one token of every running request. Each request has a forward of its own, so its tokens
    cannot depend on what runs beside it. All events leave from the engine's thread. ``on_death`` is called once, when
    that thread can make no further step and every request that was open has its error.
    """

    def __init__(
        self, model_config: ModelConfig, config: ThinkerConfig, on_death: Callable[[], None] | None = None
    ) -> None:
        self._config = config
        self._on_death = on_death
        self._admission = Admission(STAGE, config.max_open_requests, speaks=model_config.speaks)
        self._context = context_tokens(model_config, config.max_model_len)
        self._eos_ids = eos_token_ids(model_config)
        self._vocab_size = int(model_config.thinker["text_config"]["vocab_size"])
        self._default_max_tokens: int | None = model_config.generation.get("thinker_max_new_tokens")
        self._prompts = PromptBuilder(model_config, config)
        self._special_ids = frozenset(self._prompts.tokenizer.all_special_ids)
        self._logprobs = LogprobWriter(self._prompts.tokenizer)
        self._model = TransformersModel(model_config, config)
        self._shelf = RowsShelf(STAGE, config.max_num_seqs)
        self._changed = threading.Condition()  # guards what follows
        self._open: dict[str, Sequence] = {}
        self._prepared: list[Sequence] = []
        self._down: StageError | None = None
        self._waiting: deque[Sequence] = deque()  # this and the next: the engine's thread only
        self._running: list[Sequence] = []
        self._workers = ThreadPoolExecutor(config.preprocess_workers, thread_name_prefix="thinker-prompt")
        self._thread = threading.Thread(target=self._run, name="thinker-engine", daemon=True)
        self._thread.start()

    def submit(self, request: ThinkerRequest, sink: ThinkerSink) -> None:
        """Start a request. What is wrong with it reaches the sink as an OmniError (a refusal, for want of room or
        because the id is taken, before this returns).
        """
        sequence = Sequence(request, sink)
        with self._changed:
            refusal = self._down or self._admission.refusal(request, self._open)
            if refusal is None:
                self._open[sequence.id] = sequence
                self._shelf.open(sequence.id, wanted=request.want_rows)
                self._workers.submit(self._prepare, sequence)
        if refusal is not None:
            sink(refusal)

    def rows(self, request_id: str, timeout_s: float) -> PromptRows:
        """What the talker needs of the prompt, once: there as soon as prefill has run, and until it is fetched (also
        past the end of the answer, then for the last ``max_num_seqs`` requests) or the request is aborted.

        Raises: NotFoundError, RequestTimeoutError, InvalidRequestError when the request was not made with
        ``want_rows``, or the error that ended the request before prefill.
        """
        return self._shelf.take(request_id, timeout_s)

    def abort(self, request_id: str) -> None:
        """End a request with "cancelled", wherever it is. Unknown or ended ones are left alone."""
        with self._changed:
            sequence = self._open.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
                self._changed.notify_all()
        self._shelf.drop(request_id)

    def stats(self) -> dict[str, int]:
        """``running``: past prefill; ``waiting``: all other open requests."""
        with self._changed:
            running = sum(sequence.status is Status.RUNNING for sequence in self._open.values())
            return {"running": running, "waiting": len(self._open) - running}

    def close(self) -> None:
        """End every open request with an error and stop the threads."""
        with self._changed:
            self._down = self._down or StageError(STAGE, "is shutting down")
            self._changed.notify_all()
        self._thread.join()
        self._workers.shutdown(cancel_futures=True)

    def _prepare(self, sequence: Sequence) -> None:
        """In a worker thread: media, template, ids, features, positions."""
        if sequence.cancelled or self._down:
            return
        try:
            check_token_ids(sequence.request.sampling, self._vocab_size)
            check_unconstrained(sequence.request)
            encoded = self._prompts.build(sequence.request)
            check_prompt_tokens(len(encoded.token_ids), self._context)
            sequence.prompt = self._model.place(encoded)
            sequence.request = dataclasses.replace(sequence.request, media=())  # free the files
        except OmniError as error:
            sequence.error = error
        except Exception as error:
            log.exception("request %s: the prompt could not be made", sequence.id)
            sequence.error = _stage_error("the prompt could not be made", error)
        with self._changed:
            self._prepared.append(sequence)
            self._changed.notify_all()

    @torch.inference_mode()
    def _run(self) -> None:
        died = False
        try:
            while self._down is None:
                self._step(*self._news())
        except Exception as error:
            log.exception("the thinker's engine stopped")
            self._down, died = _stage_error("the engine stopped", error), True
        with self._changed:
            left = list(self._open.values())
        for sequence in left:
            self._end(sequence, self._down)
        if died and self._on_death is not None:
            self._on_death()

    def _news(self) -> tuple[list[Sequence], list[Sequence]]:
        """(cancelled, prepared) since the last step; waits while there is nothing to do."""
        with self._changed:
            while True:
                cancelled = [sequence for sequence in self._open.values() if sequence.cancelled]
                prepared, self._prepared = self._prepared, []
                if cancelled or prepared or self._waiting or self._running or self._down:
                    return cancelled, prepared
                self._changed.wait()

    def _step(self, cancelled: list[Sequence], prepared: list[Sequence]) -> None:
        for sequence in cancelled:
            self._end(sequence, ThinkerEvent(finish_reason="cancelled"))
        for sequence in prepared:
            self._welcome(sequence)
        decoding = list(self._running)
        if self._waiting and len(self._running) < self._config.max_num_seqs:
            self._advance(self._waiting.popleft())
        for sequence in decoding:
            self._advance(sequence)

    def _welcome(self, sequence: Sequence) -> None:
        if sequence.status is Status.ENDED:
            return
        if sequence.prompt is None:
            self._end(sequence, sequence.error or StageError(STAGE, "the prompt could not be made"))
            return
        sequence.status = Status.WAITING
        self._waiting.append(sequence)
        self._send(sequence, ThinkerEvent(prompt_token_ids=sequence.prompt.encoded.token_ids))

    def _advance(self, sequence: Sequence) -> None:
        """Prefill or one decode step. A failure ends this request alone, unless it is the device's last."""
        try:
            if sequence.generation is None:
                logits = self._prefill(sequence)
            else:
                logits = self._model.decode(sequence.generation.last_id, sequence.generation.kv)
            assert sequence.generation is not None
            token_id = sequence.generation.sampler.draw(logits)
            event = sequence.generation.take(token_id, self._logprob(sequence, logits, token_id))
        except Exception as error:
            log.exception("request %s failed", sequence.id)
            self._end(sequence, _stage_error("a step failed", error))
            if is_lost(self._model.device):
                raise
            return
        if event.finish_reason is not None:
            self._end(sequence, event)
        elif event.has_news:
            self._send(sequence, event)

    def _prefill(self, sequence: Sequence) -> torch.Tensor:
        prompt, sampling = sequence.prompt, sequence.request.sampling
        assert prompt is not None
        logits, kv, rows = self._model.prefill(prompt, want_rows=sequence.request.want_rows)
        prompt_ids = prompt.encoded.token_ids.tolist()
        end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        max_tokens = max_answer_tokens(sampling, len(prompt_ids), self._context, self._default_max_tokens)
        sequence.generation = Generation(
            kv=kv,
            sampler=Sampler(sampling, prompt_ids, max_tokens, end_ids, self._model.device),
            answer=Answer(
                self._prompts.decode,
                self._special_ids,
                sampling.stop,
                sampling.min_tokens,
                ToolCallParser.of(sequence.request.tools),
            ),
            end_ids=end_ids,
            max_tokens=max_tokens,
        )
        with self._changed:
            sequence.status, sequence.prompt = Status.RUNNING, None
        if rows is not None:
            self._shelf.put(sequence.id, rows)
        self._running.append(sequence)
        return logits

    def _logprob(self, sequence: Sequence, logits: torch.Tensor, token_id: int) -> TokenLogprob | None:
        """As vLLM's and OpenAI's: of the model's own distribution, whatever the sampling makes of it."""
        num_likeliest = sequence.request.sampling.logprobs
        if num_likeliest is None:
            return None
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        likeliest = logprobs.topk(num_likeliest)
        ranked = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        return self._logprobs.entry(token_id, float(logprobs[token_id]), ranked)

    def _end(self, sequence: Sequence, last: ThinkerEvent | OmniError) -> None:
        """The one place where a request ends: frees what it holds, then tells."""
        with self._changed:
            if sequence.status is Status.ENDED:
                return
            del self._open[sequence.id]
            sequence.status = Status.ENDED
            sequence.prompt = sequence.generation = None
            self._shelf.end(sequence.id, last)  # before the id is another request's
        for held in (self._waiting, self._running):
            if sequence in held:
                held.remove(sequence)
        self._send(sequence, last)

    def _send(self, sequence: Sequence, event: ThinkerEvent | OmniError) -> None:
        try:
            sequence.sink(event)
        except Exception:
            log.exception("request %s: its sink failed, so it is cancelled", sequence.id)
            sequence.cancelled = True


def _stage_error(what: str, error: Exception) -> StageError:
    return StageError(STAGE, f"{what}: {type(error).__name__}: {error}")
