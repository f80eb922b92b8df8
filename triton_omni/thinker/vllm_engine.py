"""The thinker on vLLM: its AsyncLLM in an event loop of its own, one task per request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from triton_omni.errors import ConfigError, InvalidRequestError, OmniError, StageError
from triton_omni.lifetime import when_gone
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import PromptRows, ThinkerEvent, ThinkerRequest, ThinkerSink
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker import last_words
from triton_omni.thinker.admission import Admission
from triton_omni.thinker.answer import NOTHING, Answer
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.constraint import Constraint, constraint_of
from triton_omni.thinker.grammar_check import GrammarChecker
from triton_omni.thinker.limits import (
    check_prompt_tokens,
    check_token_ids,
    eos_token_ids,
    max_answer_tokens,
)
from triton_omni.thinker.logprobs import LogprobWriter
from triton_omni.thinker.mrope import MRope
from triton_omni.thinker.prompt import PromptBuilder, is_short_text
from triton_omni.thinker.rows_channel import Bytes, RowsReceiver
from triton_omni.thinker.rows_shelf import RowsShelf
from triton_omni.thinker.tool_calls import ToolCallParser
from triton_omni.thinker.tool_grammar import tag_ids
from triton_omni.thinker.vllm_connector import ROWS_KEY
from triton_omni.thinker.vllm_prompt import VllmPrompt, check_media, to_vllm
from triton_omni.thinker.vllm_sampling import sampling_params, tokens
from triton_omni.thinker.vllm_start import start_vllm
from triton_omni.thinker.vllm_warm_up import takes_long, warm_up

log = logging.getLogger(__name__)
STAGE = "thinker"
SHUTDOWN_S = 2.0  # a server that stops waits little longer
STATS_INTERVAL_S = 10.0
_CANCELLED = ThinkerEvent(finish_reason="cancelled")


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """A request until its last event has left."""

    request: ThinkerRequest
    sink: ThinkerSink
    task: asyncio.Task[None] | None = None
    begun: bool = False
    running: bool = False
    cancelled: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id


class VllmThinker:
    """A ThinkerEngine (see ``pipeline.stages``).

    Worker threads make the prompts that take long; vLLM's engine process batches and computes; the loop's thread makes
    the other prompts, takes what the engine sends, gives ids their text, and is the one thread that all events leave
    from. All requests that have arrived are on their way to the engine before events leave, each of which wakes a
    thread that wants the GIL. ``on_death`` is called once, when vLLM's engine process has ended by itself and every
    request that was open has its error.
    """

    def __init__(
        self, model_config: ModelConfig, config: ThinkerConfig, on_death: Callable[[], None] | None = None
    ) -> None:
        self._config = config
        self._on_death = on_death
        self._admission = Admission(STAGE, config.max_open_requests, speaks=model_config.speaks)
        self._eos_ids = eos_token_ids(model_config)
        self._vocab_size = int(model_config.thinker["text_config"]["vocab_size"])
        self._default_max_tokens: int | None = model_config.generation.get("thinker_max_new_tokens")
        self._mrope = MRope.of(model_config.thinker)
        self._prompts = PromptBuilder(model_config, config)
        self._special_ids = frozenset(self._prompts.tokenizer.all_special_ids)
        self._tag_ids = tag_ids(self._prompts.tokenizer)
        self._logprobs = LogprobWriter(self._prompts.tokenizer)
        self._grammars = GrammarChecker(self._prompts.tokenizer, self._vocab_size)
        self._receiver = RowsReceiver(self._take_rows)
        self._last_words = Path(self._receiver.address).with_name("last_words")  # in its folder, which it removes
        try:
            self._llm = start_vllm(model_config, config, self._receiver.address, self._last_words)
        except BaseException:
            self._receiver.close()
            raise
        self._processes = self._llm.engine_core.resources.engine_manager.processes
        self._shelf = RowsShelf(STAGE, int(self._llm.vllm_config.scheduler_config.max_num_seqs))
        self._context = int(self._llm.vllm_config.model_config.max_model_len)
        self._dtype = str(self._llm.vllm_config.model_config.dtype).removeprefix("torch.")
        self._lock = threading.Lock()  # guards what follows
        self._open: dict[str, _Open] = {}
        self._arrived: list[_Open] = []
        self._down: StageError | None = None
        self._closing = False
        self._leaving: list[tuple[_Open, ThinkerEvent | OmniError]] = []  # the loop's alone
        self._workers = ThreadPoolExecutor(config.preprocess_workers, thread_name_prefix="thinker-prompt")
        self._grammar_worker = ThreadPoolExecutor(1, thread_name_prefix="thinker-grammar")
        self._receiver.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="thinker-engine", daemon=True)
        self._thread.start()
        for process in self._processes:
            when_gone(process.pid, self._process_ended)
        try:
            self._warm_up()
        except BaseException as error:
            words = last_words.read(self._last_words) or "its own lines above name the cause"
            self.close()
            if isinstance(error, EngineDeadError):
                raise ConfigError(f"vLLM does not answer its first requests: {words}", field="engine") from error
            raise
        if self._llm.log_stats:
            self._loop.call_soon_threadsafe(self._log_stats)

    def _warm_up(self) -> None:
        """What the first requests would otherwise wait for: each worker's own processor and template, the process that
        checks grammars, and what vLLM compiles and imports when it first meets a batch of some size or a grammar.
        """
        began_s = time.monotonic()
        if takes_long():
            self._grammar_worker.submit(self._grammars.start)
        all_there = threading.Barrier(self._config.preprocess_workers)
        for made in [self._workers.submit(self._make_a_prompt, all_there) for _ in range(all_there.parties)]:
            made.result()
        asyncio.run_coroutine_threadsafe(warm_up(self._llm, self._special_ids), self._loop).result()
        log.info("thinker: warmed up in %.1f s", time.monotonic() - began_s)

    def _log_stats(self) -> None:
        """In the loop, over and over: vLLM leaves it to who serves."""
        self._loop.create_task(self._llm.do_log_stats())
        self._loop.call_later(STATS_INTERVAL_S, self._log_stats)

    def _make_a_prompt(self, all_there: threading.Barrier) -> None:
        all_there.wait()  # so that each thread makes one
        self._prompts.warm_up()

    def submit(self, request: ThinkerRequest, sink: ThinkerSink) -> None:
        """Start a request. What is wrong with it reaches the sink as an OmniError (a refusal, for want of room or
        because the id is taken, before this returns).
        """
        entry = _Open(request, sink)
        with self._lock:
            refusal = self._down or self._admission.refusal(request, self._open)
            if refusal is None:
                self._open[entry.id] = entry
                self._shelf.open(entry.id, wanted=request.want_rows)
                if not self._arrived:
                    self._loop.call_soon_threadsafe(self._begin)
                self._arrived.append(entry)
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
        with self._lock:
            entry = self._open.get(request_id)
            if entry is not None:
                self._loop.call_soon_threadsafe(self._cancel, entry)
        self._shelf.drop(request_id)

    def stats(self) -> dict[str, int]:
        """``running``: has answer ids; ``waiting``: all other open requests."""
        with self._lock:
            running = sum(entry.running for entry in self._open.values())
            return {"running": running, "waiting": len(self._open) - running}

    def _process_ended(self) -> None:
        """From a thread that watches the engine process. vLLM itself tells only those who ask it for something."""
        died = self._death()
        with self._lock:
            if self._closing:
                return
            on_death, self._on_death = self._on_death, None
            self._down = self._down or died
            ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        log.error("the thinker serves no more: %s", died.message)
        ending.result()
        if on_death is not None:
            on_death()

    def close(self) -> None:
        """End every open request with an error and stop vLLM."""
        with self._lock:
            closed, self._closing = self._closing, True
            self._down = self._down or StageError(STAGE, "is shutting down")
        if closed:
            return
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._llm.shutdown(timeout=SHUTDOWN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._workers.shutdown(cancel_futures=True)
        self._grammars.close()
        self._grammar_worker.shutdown(cancel_futures=True)
        self._receiver.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _begin(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for entry in arrived:
            entry.task = self._loop.create_task(self._serve(entry))

    def _cancel(self, entry: _Open) -> None:
        entry.cancelled = True
        if entry.task is not None and entry.begun:  # else it would end before its first line, and tell nobody
            entry.task.cancel()

    async def _serve(self, entry: _Open) -> None:
        """One request from first to last event."""
        last: ThinkerEvent | OmniError
        entry.begun = True
        try:
            if entry.cancelled:
                raise asyncio.CancelledError
            constraint = constraint_of(entry.request, self._tag_ids)
            if constraint is not None:
                await self._loop.run_in_executor(self._grammar_worker, self._grammars.check, constraint)
            if is_short_text(entry.request):  # two changes of thread take longer while others have the GIL
                prompt = self._prepare(entry.request)
            else:
                prompt = await self._loop.run_in_executor(self._workers, self._prepare, entry.request)
            self._shelf.note(entry.id, prompt.positions)
            self._send(entry, ThinkerEvent(prompt_token_ids=prompt.token_ids))
            if entry.request.want_rows and not prompt.num_media:
                self._take_rows(entry.id, np.empty(0, np.uint8), self._dtype)
            last = await self._generate(entry, prompt, constraint)
        except asyncio.CancelledError:
            last = self._down or _CANCELLED
        except OmniError as error:
            last = error
        except EngineDeadError:
            last = self._died()
        except Exception as error:
            log.exception("request %s failed", entry.id)
            last = StageError(STAGE, f"the request failed: {type(error).__name__}: {error.__cause__ or error}")
        self._end(entry, last)

    def _prepare(self, request: ThinkerRequest) -> VllmPrompt:
        """Media, template, ids, features, positions; in a worker thread, or in the loop's where that takes no time."""
        check_token_ids(request.sampling, self._vocab_size)
        try:
            encoded = self._prompts.build(request)
            check_prompt_tokens(len(encoded.token_ids), self._context)
            prompt = to_vllm(encoded, self._mrope)
            check_media(prompt, self._llm.vllm_config.model_config.multimodal_config.get_limit_per_prompt)
            return prompt
        except OmniError:
            raise
        except Exception as error:
            log.exception("request %s: the prompt could not be made", request.request_id)
            raise StageError(STAGE, f"the prompt could not be made: {type(error).__name__}: {error}") from error

    async def _generate(self, entry: _Open, prompt: VllmPrompt, constraint: Constraint | None) -> ThinkerEvent:
        """Sends events as vLLM's outputs come; returns the last."""
        sampling = entry.request.sampling
        end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        max_tokens = max_answer_tokens(sampling, len(prompt.token_ids), self._context, self._default_max_tokens)
        wants_rows = entry.request.want_rows and prompt.num_media > 0
        extra_args = {ROWS_KEY: entry.id} if wants_rows else {}
        calls = ToolCallParser.of(entry.request.tools)
        answer = Answer(self._prompts.decode, self._special_ids, sampling.stop, sampling.min_tokens, calls)
        text = ""
        try:
            params = sampling_params(sampling, constraint, max_tokens, sorted(end_ids), extra_args)
            outputs = self._llm.generate(prompt.engine_input, params, entry.id)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    entry.running = True
                    if constraint is not None and output.outputs[0].finish_reason == "error":
                        raise constraint.too_costly(text)
                    event = self._take(output, sampling, answer, end_ids)
                    text += event.text if constraint is not None else ""
                    if constraint is not None and event.finish_reason == "stop":
                        constraint.check_whole(text, calls, sampling)
                    if event.finish_reason is not None:
                        return event
                    if event.has_news:
                        self._send(entry, event)
        except (ValueError, VLLMValidationError) as error:  # what vLLM refuses before it is scheduled
            field = getattr(error, "parameter", None) or "messages"
            raise InvalidRequestError(field, f"refused by the engine: {error}") from error
        raise StageError(STAGE, "the engine ended the answer without a reason")

    def _take(
        self, output: RequestOutput, sampling: ThinkerSampling, answer: Answer, end_ids: frozenset[int]
    ) -> ThinkerEvent:
        """The event that new ids make: what became certain, and the finish reason if it is the last."""
        completion = output.outputs[0]
        piece = NOTHING
        for token_id, logprob in tokens(completion, sampling.logprobs, self._logprobs):
            piece += answer.finish() if token_id in end_ids else answer.push(token_id, logprob)
            if token_id in end_ids or piece.stopped:
                return piece.event("stop")
        if completion.finish_reason is None:
            return piece.event(None)
        if completion.finish_reason not in ("stop", "length"):
            raise StageError(STAGE, f"the engine ended the answer: {completion.finish_reason}")
        piece += answer.finish(cut=completion.finish_reason == "length")
        return piece.event("length" if completion.finish_reason == "length" and not piece.stopped else "stop")

    def _take_rows(self, request_id: str, rows: Bytes, dtype: str) -> None:
        """From the receiver's thread, perhaps when a short answer has already ended."""
        positions = self._shelf.positions(request_id)
        if positions is not None:
            self._shelf.put(request_id, PromptRows(positions, rows, dtype))

    def _died(self) -> StageError:
        died = self._death()
        for process in self._processes:
            process.kill()  # it waits up to 18 s for its workers, which end with it
        with self._lock:
            self._down = self._down or died
            return self._down

    def _death(self) -> StageError:
        words = last_words.read(self._last_words)
        return StageError(STAGE, "the engine process died" + (f"; its last error was {words}" if words else ""))

    async def _end_all(self) -> None:
        entries = list(self._open.values())
        for entry in entries:
            self._cancel(entry)
        await asyncio.gather(*(entry.task for entry in entries if entry.task is not None), return_exceptions=True)
        self._deliver()

    def _end(self, entry: _Open, last: ThinkerEvent | OmniError) -> None:
        """The one place where a request ends: frees what it holds, then tells."""
        with self._lock:
            self._open.pop(entry.id, None)
            self._shelf.end(entry.id, last)  # before the id is another request's
        self._send(entry, last)

    def _send(self, entry: _Open, event: ThinkerEvent | OmniError) -> None:
        """After all that the loop is already to do, the tasks of new requests above all."""
        if not self._leaving:
            self._loop.call_soon(self._deliver)
        self._leaving.append((entry, event))

    def _deliver(self) -> None:
        leaving, self._leaving = self._leaving, []
        for entry, event in leaving:
            try:
                entry.sink(event)
            except Exception:
                log.exception("request %s: its sink failed, so it is cancelled", entry.id)
                self._cancel(entry)
