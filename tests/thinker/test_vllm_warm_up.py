"""What a new vLLM engine is asked before it is ready, on a GPU and on CPU."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from triton_omni.thinker.constraint import Constraint
from triton_omni.thinker.grammar_check import GrammarChecker

pytestmark = pytest.mark.vllm
PLACES = 3


@pytest.fixture(scope="module")
def vllm_warm_up() -> Any:
    """The module, without what torch's modules say of each other when vLLM imports them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", exc_type=ImportError)
        from triton_omni.thinker import vllm_warm_up
    return vllm_warm_up


class Llm:
    """Notes (prompt length, params) of each request; ``refuses`` grammars."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.asked: list[tuple[int, Any]] = []
        self.was_reset = False
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=302, get_vocab_size=lambda: 100),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=PLACES),
        )

    async def generate(self, prompt: Any, params: Any, _: str) -> AsyncIterator[None]:
        self.asked.append((len(prompt["prompt_token_ids"]), params))
        if self.refuses and params.structured_outputs is not None:
            raise ValueError("no grammars here")
        yield

    async def reset_prefix_cache(self) -> None:
        self.was_reset = True

    @property
    def lengths(self) -> list[int]:
        return [length for length, _ in self.asked]


@pytest.mark.parametrize("refuses", [False, True])
def test_on_a_gpu(vllm_warm_up: Any, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    monkeypatch.setattr(vllm_warm_up, "takes_long", lambda: True)
    llm = Llm(refuses=refuses)
    asyncio.run(vllm_warm_up.warm_up(llm, {0, 1}))
    assert llm.lengths == [16, 64, 129, 256, 257, *[16] * PLACES, 16]
    assert [params.structured_outputs is not None for _, params in llm.asked] == [False] * (5 + PLACES) + [True]
    assert llm.was_reset


def test_on_cpu(vllm_warm_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_warm_up, "takes_long", lambda: False)
    llm = Llm()
    asyncio.run(vllm_warm_up.warm_up(llm, {0, 1}))
    assert llm.lengths == [16, 16] and all(params.structured_outputs is None for _, params in llm.asked)


def test_vllm_answers_it_all(
    vllm_warm_up: Any, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_warm_up, "takes_long", lambda: True)
    monkeypatch.setattr(vllm_warm_up, "_STEP_TOKENS", (16, 64))
    whole = vllm_warm_up.warm_up(vllm_engine._llm, vllm_engine._special_ids)
    asyncio.run_coroutine_threadsafe(whole, vllm_engine._loop).result()
    assert not [record for record in caplog.records if record.name == vllm_warm_up.__name__]


def test_the_checker_of_grammars_can_be_started_ahead(tokenizer: Any) -> None:
    pytest.importorskip("llguidance")
    checker = GrammarChecker(tokenizer, len(tokenizer))
    try:
        checker.start()
        process = checker._process
        assert process is not None and process.poll() is None
        checker.check(Constraint("json", "{}", "response_format.type", "response_format.type"))
        assert checker._process is process
    finally:
        checker.close()
    checker.start()
    assert checker._process is None
