"""Requests that arrive together on their way into vLLM, and which thread makes their prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.thinker.support import TIMEOUT_S, Answered, ask, request, send
from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEvent
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.prompt import PromptBuilder, RenderedPrompt, is_short_text
from triton_omni.tools import ToolUse

LONG_TEXT = "so " * 2000
TOOLS = ToolUse(({"type": "function", "function": {"name": "now"}},))


@contextmanager
def held(submit: Any, threads: int) -> Iterator[None]:
    """Keeps ``threads`` threads of what takes work through ``submit`` from it."""
    go, there = threading.Event(), threading.Barrier(threads + 1)

    def stay() -> None:
        there.wait(TIMEOUT_S)
        assert go.wait(TIMEOUT_S)

    for _ in range(threads):
        submit(stay)
    there.wait(TIMEOUT_S)
    try:
        yield
    finally:
        go.set()


@pytest.mark.vllm
def test_all_that_have_arrived_are_admitted_before_events_leave(vllm_engine: Any) -> None:
    admitted: list[int] = []
    processor = vllm_engine._llm.output_processor

    class Sink(Answered):
        def __call__(self, event: Any) -> None:
            if not self.events:
                admitted.append(processor.get_num_unfinished_requests())
            super().__call__(event)

    sinks = [Sink() for _ in range(8)]
    with held(vllm_engine._loop.call_soon_threadsafe, 1):
        for sink in sinks:
            vllm_engine.submit(request("hello", max_tokens=4, ignore_eos=True), sink)
    for sink in sinks:
        assert len(sink.done().ids) == 4
        assert sink.prompt
    assert admitted == [8] * 8


@pytest.mark.vllm
def test_short_text_does_not_wait_for_long_prompts(vllm_engine: Any) -> None:
    with held(vllm_engine._workers.submit, ThinkerConfig().preprocess_workers):
        long = send(vllm_engine, request(LONG_TEXT, max_tokens=1))
        assert ask(vllm_engine, request("hello", max_tokens=1)).error is None
        assert not long.events
    assert long.done().error is None


@pytest.mark.vllm
def test_what_vllm_refuses_ends_after_the_prompt(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both leave in one go, in this order."""

    def refuse(*_: Any) -> Any:
        raise ValueError("too blue")

    monkeypatch.setattr(vllm_engine._llm, "generate", refuse)
    sink = ask(vllm_engine, request("hello"))
    assert isinstance(sink.error, InvalidRequestError) and "too blue" in sink.error.message
    assert sink.prompt


@pytest.mark.vllm
def test_a_failing_sink_frees_its_request_alone(vllm_engine: Any) -> None:
    ended = threading.Event()

    def fails(event: Any) -> None:
        if isinstance(event, ThinkerEvent) and event.finish_reason == "cancelled":
            ended.set()
        raise RuntimeError("out of luck")

    with held(vllm_engine._loop.call_soon_threadsafe, 1):
        vllm_engine.submit(request("hello", max_tokens=900, ignore_eos=True), fails)
        healthy = send(vllm_engine, request("hello", max_tokens=4, ignore_eos=True))
    assert len(healthy.done().ids) == 4
    assert ended.wait(TIMEOUT_S)
    assert vllm_engine.stats() == {"running": 0, "waiting": 0}


@pytest.mark.vllm
def test_a_request_has_sampling_parameters_of_its_own() -> None:
    """vLLM is told not to copy them, and changes them."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from triton_omni.thinker.vllm_sampling import sampling_params

    first, second = (sampling_params(ThinkerSampling(), None, 8, [5], {}) for _ in range(2))
    assert first == second and first is not second
    copied = first.clone()
    copied.update_from_generation_config({"eos_token_id": [7, 8]}, 7)
    assert copied.stop_token_ids != second.stop_token_ids == [5]
    assert second._all_stop_token_ids == {5}


@pytest.mark.parametrize(
    ("what", "short"),
    [
        (request("hello"), True),
        (request([{"type": "text", "text": "hello"}]), True),
        (request("x" * 4000), True),
        (request("x" * 4100), False),
        (request([{"type": "text", "text": "x" * 2000}] * 3), False),
        (request(None, messages=[{"role": "user", "content": "x"}] * 64), False),
        (request(None, messages=[7, {"role": "user"}, {"content": 7}, {"content": [7, {"text": 7}]}]), True),
        (request(None, messages=[{"role": "assistant", "content": "", "tool_calls": []}]), False),
        (request("hello", tools=TOOLS), False),
        (request([{"type": "image", "media": 0}], media=(b"",)), False),
    ],
)
def test_what_is_made_without_a_change_of_thread(what: Any, short: bool) -> None:
    assert is_short_text(what) == short


def test_text_is_encoded_as_by_the_tokenizer(model_config: ModelConfig, tokenizer: Any) -> None:
    prompts = PromptBuilder(model_config, ThinkerConfig())
    for text in ("", " a  b\n\n", "<|im_start|>user\nü 😀 中文 \u0301e<|im_end|>", "<|im_start", "\ufeffx" * 300):
        assert prompts.encode(RenderedPrompt(text)).token_ids.tolist() == tokenizer(text).input_ids
