"""vLLM's own arguments: which the thinker refuses by name, and what those do that it takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.thinker.support import TIMEOUT_S, Answered, Media, ask, request, start_vllm
from triton_omni.errors import ConfigError, InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker

pytestmark = pytest.mark.vllm
CPU = ThinkerConfig(engine="vllm", dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    """vLLM without what torch's modules say of each other when it imports them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", exc_type=ImportError)
        import triton_omni.thinker.vllm_engine  # noqa: F401


def given(**vllm_args: Any) -> ThinkerConfig:
    return dataclasses.replace(CPU, vllm_args=json.dumps(vllm_args))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("runner", "pooling", "answers with text"),
        ("convert", "embed", "answers with text"),
        ("mm_encoder_only", True, "answers with text"),
        ("model_impl", "transformers", "model class of its own"),
        ("kv_offloading_size", 1.0, "KV connector"),
        ("enable_lora", True, "adapter"),
        ("override_generation_config", {"temperature": 0.2}, "sampling"),
        ("generation_config", "/models/defaults", "sampling"),
        ("mm_processor_kwargs", {"max_pixels": 1000}, "prompts itself"),
        ("scheduling_policy", "priority", "max_open_requests"),
        ("skip_tokenizer_init", True, "tokenizer"),
        ("reasoning_parser", "qwen3", "first token"),
        ("structured_outputs_config", {"reasoning_parser": "qwen3"}, "first token"),
    ],
)
def test_what_would_change_nothing_or_break_answers_is_refused(
    model_config: ModelConfig, key: str, value: Any, told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_thinker(model_config, given(**{key: value}))
    assert (raised.value.field or "").startswith(f"vllm_args.{key}")
    assert told in raised.value.message


def test_what_is_so_anyway_may_be_said(model_config: ModelConfig) -> None:
    from triton_omni.thinker.vllm_args import engine_args

    usual = {"runner": "generate", "generation_config": "vllm", "enable_lora": False, "mm_processor_kwargs": None}
    assert engine_args(model_config, given(**usual), "").runner == "generate"


@pytest.mark.parametrize(
    ("vllm_args", "told"),
    [
        ({"compilation_config": {"cudagraph_mode": "NOPE"}}, "KeyError: 'NOPE'"),
        ({"speculative_config": "ngram"}, "AttributeError: 'str'"),
    ],
)
def test_whatever_vllm_raises_about_an_argument_is_a_refusal(
    model_config: ModelConfig, vllm_args: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        load_thinker(model_config, given(**vllm_args))
    assert raised.value.field == "vllm_args"


def test_drafts_from_layers_that_the_talker_gets_are_refused(model_config: ModelConfig) -> None:
    drafts = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    }
    with pytest.raises(ConfigError, match="extract_hidden_states") as raised:
        load_thinker(model_config, given(speculative_config=drafts))
    assert raised.value.field == "vllm_args.speculative_config"


def test_keys_and_values_of_a_type_that_cpus_misread_are_refused(model_config: ModelConfig) -> None:
    """The demo's answers differ from their first token on, with and without speech."""
    with pytest.raises(ConfigError, match="auto or float32") as raised:
        load_thinker(model_config, given(kv_cache_dtype="bfloat16"))
    assert raised.value.field == "vllm_args.kv_cache_dtype"


def test_traces_have_the_statistics_that_spans_are_made_of(model_config: ModelConfig) -> None:
    from triton_omni.thinker.vllm_args import engine_args

    assert engine_args(model_config, given(), "").disable_log_stats
    assert not engine_args(model_config, given(otlp_traces_endpoint="http://localhost:4317"), "").disable_log_stats


def test_a_failed_start_says_what_the_engine_process_said(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton_omni.thinker import last_words, vllm_start

    logger = logging.getLogger("vllm")
    before = list(logger.handlers)

    options: dict[str, Any] = {}

    def fail(_: Any, **given_: Any) -> None:
        options.update(given_)
        last_words.keep()
        logger.error("it fails", exc_info=ValueError("No common block size for 16."))
        raise RuntimeError("See root cause above.")

    monkeypatch.setattr(vllm_start.AsyncLLM, "from_vllm_config", fail)
    try:
        with pytest.raises(ConfigError, match=r"ValueError: No common block size for 16\.") as raised:
            load_thinker(model_config, given(enable_log_requests=True))
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)
    assert raised.value.field == "engine"
    assert options["enable_log_requests"]


def test_an_engine_that_dies_of_its_first_request_stops_the_load(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from triton_omni.thinker import vllm_engine

    llm = mock.MagicMock()
    llm.engine_core.resources.engine_manager.processes = []
    llm.vllm_config.scheduler_config.max_num_seqs = 8
    llm.vllm_config.model_config.max_model_len = 64
    monkeypatch.setattr(vllm_engine, "start_vllm", lambda *_: llm)
    monkeypatch.setattr(vllm_engine, "warm_up", mock.AsyncMock(side_effect=EngineDeadError()))
    with pytest.raises(ConfigError, match="first requests: its own lines above") as raised:
        vllm_engine.VllmThinker(model_config, CPU)
    assert raised.value.field == "engine"
    llm.shutdown.assert_called_once()


@pytest.mark.parametrize(
    ("places", "told"),
    [({"image": 2, "audio": 1}, ""), ({"image": 3}, "at most 2 of image"), ({"video": 1, "audio": 2}, "sound counted")],
)
def test_media_in_a_prompt_are_counted(places: dict[str, int], told: str) -> None:
    from triton_omni.thinker.vllm_prompt import VllmPrompt, check_media

    nothing = np.empty(0, np.int32)
    prompt = VllmPrompt(
        nothing, nothing, 1, {"mm_placeholders": {kind: [SimpleNamespace()] * n for kind, n in places.items()}}
    )
    limit_of: Callable[[str], int] = {"image": 2, "audio": 1, "video": 999}.__getitem__
    check_media(VllmPrompt(nothing, nothing, 0, {}), limit_of)
    if not told:
        check_media(prompt, limit_of)
        return
    with pytest.raises(InvalidRequestError, match=told) as raised:
        check_media(prompt, limit_of)
    assert raised.value.field == "messages"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_limits_and_statistics_hold(
    model_config: ModelConfig, vllm_engine: Any, media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that is not loaded takes no request with it, and the others give the rows that they give without
    limits; vLLM's statistics reach its log; as many rows wait to be fetched as vLLM runs requests.
    """
    from triton_omni.thinker import vllm_engine as module

    told: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    logger = logging.getLogger("vllm.v1.metrics.loggers")
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    monkeypatch.setattr(module, "STATS_INTERVAL_S", 0.1)
    files = (media.audio, media.image, media.video)

    def shown(engine: Any, *kinds: str) -> tuple[Answered, str]:
        parts = [{"type": kind, "media": ("audio", "image", "video").index(kind)} for kind in kinds]
        content = [*parts, {"type": "text", "text": "well?"}]
        what = request(content, media=files, use_audio_in_video=True, max_tokens=4, want_rows=True)
        return ask(engine, what), what.request_id

    logger.addHandler(handler)
    limited = start_vllm(model_config, limit_mm_per_prompt={"audio": 0}, disable_log_stats=False, max_num_seqs=2)
    try:
        for kinds in (("audio",), ("video",)):  # a video has sound
            error = shown(limited, *kinds)[0].error
            assert isinstance(error, InvalidRequestError) and "at most 0 of audio" in error.message
        rows = []
        for engine in (limited, vllm_engine):
            sink, request_id = shown(engine, "image")
            assert sink.ids
            rows.append(engine.rows(request_id, TIMEOUT_S).rows.view(np.float32))
        np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)
        waiting = [shown(limited, "image")[1] for _ in range(3)]
        assert limited.rows(waiting[2], TIMEOUT_S).rows.size and limited.rows(waiting[1], TIMEOUT_S).rows.size
        with pytest.raises(InvalidRequestError, match="no open request"):
            limited.rows(waiting[0], 0)
        until_s = time.monotonic() + TIMEOUT_S
        while not any("generation throughput" in line for line in told) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert any("generation throughput" in line for line in told)
    finally:
        limited.close()
        logger.removeHandler(handler)
