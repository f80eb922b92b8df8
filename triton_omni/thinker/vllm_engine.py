"""The thinker on vLLM: its AsyncLLM in an event loop of its own, one task per request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from triton_omni.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    OmniError,
    RequestCancelledError,
    StageError,
)
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import FinishReason, PromptRows, ThinkerEvent, ThinkerRequest, ThinkerSink
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.answer import Answer
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.limits import (
    check_prompt_tokens,
    check_stop_token_ids,
    eos_token_ids,
    max_answer_tokens,
)
from triton_omni.thinker.mrope import MRope
from triton_omni.thinker.prompt import PromptBuilder
from triton_omni.thinker.rows_channel import Bytes, RowsReceiver
from triton_omni.thinker.rows_shelf import RowsShelf
from triton_omni.thinker.vllm_args import engine_args
from triton_omni.thinker.vllm_connector import ROWS_KEY
from triton_omni.thinker.vllm_plugin import register
from triton_omni.thinker.vllm_prompt import VllmPrompt, to_vllm

log = logging.getLogger(__name__)
STAGE = "thinker"
SHUTDOWN_S = 2.0  # a server that stops waits little longer
_CANCELLED = ThinkerEvent(finish_reason="cancelled")


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """A request until its last event has left."""

    request: ThinkerRequest
    sink: ThinkerSink
    task: asyncio.Task[None] | None = None
    prompt: VllmPrompt | None = None
    running: bool = False
    cancelled: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id


class VllmThinker:
    """A ThinkerEngine (see ``pipeline.stages``).

    Worker threads make the prompts; vLLM's engine process batches and computes; the loop's thread takes what it
    sends, gives ids their text, and is the one thread that all events leave from.
    """

    def __init__(self, model_config: ModelConfig, config: ThinkerConfig) -> None:
        self._config = config
        self._speaks = model_config.speaks
        self._eos_ids = eos_token_ids(model_config)
        self._vocab_size = int(model_config.thinker["text_config"]["vocab_size"])
        self._default_max_tokens: int | None = model_config.generation.get("thinker_max_new_tokens")
        self._mrope = MRope.of(model_config.thinker)
        self._prompts = PromptBuilder(model_config, config)
        self._special_ids = frozenset(self._prompts.tokenizer.all_special_ids)
        self._shelf = RowsShelf(STAGE, config.max_num_seqs)
        self._receiver = RowsReceiver(self._take_rows)
        try:
            self._llm = _start(model_config, config, self._receiver.address)
        except BaseException:
            self._receiver.close()
            raise
        self._context = int(self._llm.vllm_config.model_config.max_model_len)
        self._dtype = str(self._llm.vllm_config.model_config.dtype).removeprefix("torch.")
        self._lock = threading.Lock()  # guards what follows
        self._open: dict[str, _Open] = {}
        self._down: StageError | None = None
        self._workers = ThreadPoolExecutor(config.preprocess_workers, thread_name_prefix="thinker-prompt")
        self._receiver.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="thinker-engine", daemon=True)
        self._thread.start()

    def submit(self, request: ThinkerRequest, sink: ThinkerSink) -> None:
        """Start a request. What is wrong with it reaches the sink as an OmniError (a refusal, for want of room or
        because the id is taken, before this returns).
        """
        entry = _Open(request, sink)
        with self._lock:
            refusal = self._refusal(request)
            if refusal is None:
                self._open[entry.id] = entry
                self._shelf.open(entry.id, wanted=request.want_rows)
                self._loop.call_soon_threadsafe(self._begin, entry)
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

    def alive(self) -> bool:
        """False once vLLM's engine process is gone: nothing will be served any more."""
        return self._down is None and not self._llm.errored

    def close(self) -> None:
        """End every open request with an error and stop vLLM."""
        with self._lock:
            closed = self._loop.is_closed()
            self._down = self._down or StageError(STAGE, "is shutting down")
        if closed:
            return
        asyncio.run_coroutine_threadsafe(self._end_all(self._down), self._loop).result()
        self._llm.shutdown(timeout=SHUTDOWN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._workers.shutdown(cancel_futures=True)
        self._receiver.close()

    def _refusal(self, request: ThinkerRequest) -> OmniError | None:
        if self._down is not None:
            return self._down
        if request.request_id in self._open:
            return InvalidRequestError("request_id", f"must be new; {request.request_id!r} is still open")
        if request.want_rows and not self._speaks:
            return InvalidRequestError("want_rows", "must be false: this checkpoint has no speech output")
        if len(self._open) >= self._config.max_open_requests:
            return CapacityError(f"{len(self._open)} requests are open, the most that are accepted", field=STAGE)
        return None

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _begin(self, entry: _Open) -> None:
        entry.task = self._loop.create_task(self._serve(entry))
        if entry.cancelled:
            entry.task.cancel()

    def _cancel(self, entry: _Open) -> None:
        entry.cancelled = True
        if entry.task is not None:
            entry.task.cancel()

    async def _serve(self, entry: _Open) -> None:
        """One request from first to last event."""
        last: ThinkerEvent | OmniError
        try:
            entry.prompt = await self._loop.run_in_executor(self._workers, self._prepare, entry.request)
            self._send(entry, ThinkerEvent(prompt_token_ids=entry.prompt.token_ids))
            if entry.request.want_rows and not entry.prompt.num_media:
                self._take_rows(entry.id, np.empty(0, np.uint8), self._dtype)
            last = await self._generate(entry, entry.prompt)
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
        """In a worker thread: media, template, ids, features, positions."""
        check_stop_token_ids(request.sampling, self._vocab_size)
        try:
            encoded = self._prompts.build(request)
            check_prompt_tokens(len(encoded.token_ids), self._context)
            return to_vllm(encoded, self._mrope)
        except OmniError:
            raise
        except Exception as error:
            log.exception("request %s: the prompt could not be made", request.request_id)
            raise StageError(STAGE, f"the prompt could not be made: {type(error).__name__}: {error}") from error

    async def _generate(self, entry: _Open, prompt: VllmPrompt) -> ThinkerEvent:
        """Sends events as vLLM's outputs come; returns the last."""
        sampling = entry.request.sampling
        end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        max_tokens = max_answer_tokens(sampling, len(prompt.token_ids), self._context, self._default_max_tokens)
        wants_rows = entry.request.want_rows and prompt.num_media > 0
        params = _sampling_params(sampling, max_tokens, sorted(end_ids), {ROWS_KEY: entry.id} if wants_rows else {})
        answer = Answer(self._decode_ids, self._special_ids, sampling.stop, sampling.min_tokens)
        try:
            outputs = self._llm.generate(prompt.engine_input, params, entry.id)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    entry.running = True
                    event = _take(output, answer, end_ids)
                    if event.finish_reason is not None:
                        return event
                    if event.token_ids.size or event.text:
                        self._send(entry, event)
        except ValueError as error:  # what vLLM refuses before it is scheduled
            raise InvalidRequestError("messages", f"are refused by the engine: {error}") from error
        raise StageError(STAGE, "the engine ended the answer without a reason")

    def _decode_ids(self, token_ids: list[int]) -> str:
        text: str = self._prompts.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _take_rows(self, request_id: str, rows: Bytes, dtype: str) -> None:
        with self._lock:
            entry = self._open.get(request_id)
        if entry is not None and entry.prompt is not None:
            self._shelf.put(request_id, PromptRows(entry.prompt.positions, rows, dtype))

    def _died(self) -> StageError:
        with self._lock:
            if self._down is None:
                self._down = StageError(STAGE, "the engine process died")
                log.error("vLLM's engine process died; the thinker serves no more")
            return self._down

    async def _end_all(self, error: StageError) -> None:
        tasks = [entry.task for entry in list(self._open.values()) if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, entry: _Open, last: ThinkerEvent | OmniError) -> None:
        """The one place where a request ends: frees what it holds, then tells."""
        with self._lock:
            self._open.pop(entry.id, None)
        if isinstance(last, OmniError):
            self._shelf.close(entry.id, last)
        elif last.finish_reason == "cancelled":
            self._shelf.close(entry.id, RequestCancelledError(f"request {entry.id!r} was cancelled"))
        else:
            self._shelf.close(entry.id)
        self._send(entry, last)

    def _send(self, entry: _Open, event: ThinkerEvent | OmniError) -> None:
        try:
            entry.sink(event)
        except Exception:
            log.exception("request %s: its sink failed, so it is cancelled", entry.id)
            self._cancel(entry)


def _start(model_config: ModelConfig, config: ThinkerConfig, rows_socket: str) -> AsyncLLM:
    """Loads the weights in vLLM's engine process. Raises ConfigError with what vLLM says."""
    register()  # here too, for an installation whose entry points vLLM cannot see
    args = engine_args(model_config, config, rows_socket)
    try:
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"are refused by vLLM: {error}", field="vllm_args") from error
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=args.disable_log_stats)
    except Exception as error:
        raise ConfigError(f"vLLM does not start: {type(error).__name__}: {error}", field="engine") from error


def _sampling_params(
    sampling: ThinkerSampling, max_tokens: int, end_ids: list[int], extra_args: dict[str, Any]
) -> SamplingParams:
    """Ids only: text, and stop strings in it, are found here as with any engine."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        stop_token_ids=end_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args or None,
    )


def _take(output: RequestOutput, answer: Answer, end_ids: frozenset[int]) -> ThinkerEvent:
    """The event that new ids make: what became certain, and the finish reason if it is the last."""
    completion = output.outputs[0]
    ids: list[int] = []
    text = ""
    for token_id in completion.token_ids:
        piece = answer.finish() if token_id in end_ids else answer.push(token_id)
        ids += piece.token_ids
        text += piece.text
        if token_id in end_ids or piece.stopped:
            return _event(ids, text, "stop")
    if completion.finish_reason is None:
        return _event(ids, text, None)
    rest = answer.finish()
    if completion.finish_reason not in ("stop", "length"):
        raise StageError(STAGE, f"the engine ended the answer: {completion.finish_reason}")
    reason: FinishReason = "length" if completion.finish_reason == "length" and not rest.stopped else "stop"
    return _event(ids + rest.token_ids, text + rest.text, reason)


def _event(ids: list[int], text: str, reason: FinishReason | None) -> ThinkerEvent:
    return ThinkerEvent(token_ids=np.array(ids, np.int32), text=text, finish_reason=reason)
