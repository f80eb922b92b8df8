"""An engine process that fails in the middle of answers: what it said of why reaches everybody who waits for it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.thinker.support import TIMEOUT_S, ask, request, send, start_vllm
from triton_omni.errors import StageError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker import last_words

SAID = "CUDA out of memory. Tried to allocate 1.00 GiB."


def fail_from_now_on(worker: Any) -> None:
    """In vLLM's worker: the next step is the last one."""
    import torch

    def execute_model(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(SAID)

    worker.model_runner.execute_model = execute_model


@pytest.mark.vllm
def test_a_worker_without_memory(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # fail_from_now_on is sent as code
    dead = threading.Event()
    engine = start_vllm(model_config, dead.set)
    try:
        open_ = [send(engine, request("hello", max_tokens=3000, ignore_eos=True)) for _ in range(9)]
        open_[0].until(lambda sink: len(sink.ids) > 3)
        engine._loop.call_soon_threadsafe(
            lambda: engine._loop.create_task(engine._llm.collective_rpc(fail_from_now_on))
        )
        for sink in open_:
            error = sink.done().error
            assert isinstance(error, StageError) and SAID in error.message
        assert dead.wait(TIMEOUT_S)
        assert SAID in str(ask(engine, request("hello")).error)
        assert SAID in caplog.text
        assert engine.stats() == {"running": 0, "waiting": 0}
    finally:
        engine.close()


def test_the_last_exception_counts_in_few_words(tmp_path: Path) -> None:
    path, logger = tmp_path / "words", logging.getLogger("vllm")
    before = list(logger.handlers)
    with last_words.kept_in(path):
        last_words.keep()
    try:
        assert last_words.read(path) == ""
        for error in (KeyError("first"), ValueError("a\n" + "long " * 1000)):
            logging.getLogger("vllm.anywhere").error("it fails", exc_info=error)
        logger.error("no exception")
        words = last_words.read(path)
        assert words.startswith("ValueError: a long long ") and words.endswith(" …") and len(words) <= 240
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)


def test_who_is_not_asked_keeps_nothing() -> None:
    handlers = list(logging.getLogger("vllm").handlers)
    last_words.keep()
    assert logging.getLogger("vllm").handlers == handlers
    assert not [name for name in os.environ if "LAST_WORDS" in name]
