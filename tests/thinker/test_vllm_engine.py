"""vLLM under small chunks, a warm prefix cache, a crowd and a shortage of blocks; and its death."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.oracle import DecodedVideo, Oracle
from tests.talker.conftest import speak, start_of
from tests.thinker.support import TIMEOUT_S, Answered, Media, ask, request, send, start_vllm
from tests.thinker.test_parity import CASES
from triton_omni.errors import ConfigError, OmniError, StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import PromptRows, TalkerEngine
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.factory import load_talker
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker

pytestmark = pytest.mark.vllm
MEDIA_CASES = ("audio", "image", "audio and image", "video", "all in two turns")
TEXT_TOKENS, FRAMES = 12, 16
BLOCKS = 40  # of 32 tokens


@pytest.fixture(scope="module")
def death() -> threading.Event:
    """Set when ``small_chunks`` says that its engine process has died."""
    return threading.Event()


@pytest.fixture(scope="module")
def small_chunks(model_config: ModelConfig, death: threading.Event) -> Iterator[Any]:
    """Every media prompt takes several steps to prefill, and eight of them do not fit into the cache together."""
    engine = start_vllm(
        model_config,
        death.set,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=1024,
    )
    yield engine
    engine.close()


@pytest.fixture
def talker(model_config: ModelConfig) -> Iterator[TalkerEngine]:
    engine = load_talker(model_config, TalkerConfig(dtype="float32", device="cpu", max_sessions=1, max_context=1024))
    yield engine
    engine.close()


def asked(media: Media, case: str, **changes: Any) -> Any:
    files = (media.audio, media.image, media.video)
    options = {"max_tokens": TEXT_TOKENS, "want_rows": True} | changes
    return request(None, messages=CASES[case], media=files, **options)


def expect(oracle: Oracle, media: Media, case: str) -> Any:
    decoded = DecodedVideo(media.frames, fps=2.0, audio=media.track)
    files = (media.audio, media.image, decoded)
    return oracle.answer(CASES[case], files, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES)


def check(sink: Answered, rows: PromptRows, expected: Any) -> None:
    assert sink.prompt == expected.prompt_token_ids.tolist()
    assert sink.ids == expected.token_ids.tolist()
    np.testing.assert_array_equal(rows.positions, expected.positions)
    got = rows.rows.view(np.float32).reshape(expected.rows.shape)
    np.testing.assert_allclose(got, expected.rows, atol=5e-4, rtol=1e-4)


def test_chunks_and_a_warm_cache_change_nothing(small_chunks: Any, oracle: Oracle, media: Media) -> None:
    for case in MEDIA_CASES * 2:
        what = asked(media, case)
        check(ask(small_chunks, what), small_chunks.rows(what.request_id, TIMEOUT_S), expect(oracle, media, case))


def test_a_crowd_changes_nothing(small_chunks: Any, oracle: Oracle, media: Media) -> None:
    """Sixteen at once, of which eight run, on shared blocks."""
    crowd = [(case, asked(media, case)) for case in (*MEDIA_CASES, "text", "several turns", "audio") * 2]
    with ThreadPoolExecutor(len(crowd)) as threads:
        sinks = [send(small_chunks, what) for _, what in crowd]
        rows = threads.map(lambda each: small_chunks.rows(each[1].request_id, TIMEOUT_S), crowd)
        for (case, _), sink, got in zip(crowd, sinks, rows, strict=True):
            check(sink.done(), got, expect(oracle, media, case))


def test_preemption_changes_nothing(small_chunks: Any, media: Media) -> None:
    """Eight answers that outgrow the cache together: some lose their blocks and start again."""
    cases = ("audio", "image", "text", "several turns") * 2
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    alone = {case: ask(small_chunks, asked(media, case, **long)).ids for case in cases[:4]}
    assert BLOCKS < 8 * (200 // 32)
    sinks = [send(small_chunks, asked(media, case, **long)) for case in cases]
    for case, sink in zip(cases, sinks, strict=True):
        assert sink.done().ids == alone[case]


def test_codes_equal_transformers(small_chunks: Any, oracle: Oracle, media: Media, talker: TalkerEngine) -> None:
    for case in ("audio", "image", "audio and image", "all in two turns"):
        expected = expect(oracle, media, case)
        what = asked(media, case)
        sink = ask(small_chunks, what)
        rows = small_chunks.rows(what.request_id, TIMEOUT_S).rows.view(np.float32).reshape(expected.rows.shape)
        answer = dataclasses.replace(expected, rows=rows, token_ids=np.array(sink.ids, np.int32))
        codes, _ = speak(talker, start_of(answer, max_frames=FRAMES))
        np.testing.assert_array_equal(codes, expected.codes)


@pytest.mark.parametrize(
    ("vllm_args", "field", "told"),
    [
        ('{"tensor_paralel_size": 2}', "vllm_args.tensor_paralel_size", "'tensor_parallel_size'"),
        ('{"model": "other"}', "vllm_args.model", "set by the thinker"),
        ("[1]", "vllm_args", "JSON object"),
        ("{", "vllm_args", "JSON object"),
        ('{"quantization": "magic"}', "vllm_args", "magic"),
        (
            '{"structured_outputs_config": {"backend": "xgrammar"}}',
            "vllm_args.structured_outputs_config.backend",
            "guidance",
        ),
        ('{"structured_outputs_config": {"white": true}}', "vllm_args.structured_outputs_config", "white"),
    ],
)
def test_wrong_arguments_name_themselves(
    model_config: ModelConfig, small_chunks: Any, vllm_args: str, field: str, told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_thinker(model_config, ThinkerConfig(engine="vllm", vllm_args=vllm_args))
    assert raised.value.field == field
    assert told in raised.value.message


@pytest.mark.parametrize(
    ("changes", "field"), [({"device": "cuda:3"}, "device"), ({"max_model_len": 10**9}, "max_model_len")]
)
def test_settings_that_do_not_fit_stop_the_load(
    model_config: ModelConfig, small_chunks: Any, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_thinker(model_config, ThinkerConfig(engine="vllm", **changes))
    assert raised.value.field == field


def test_requests_that_are_taken_back_at_once_end(small_chunks: Any) -> None:
    """Some of them before their task has run its first line."""
    asked_ = [request("hello", max_tokens=900, ignore_eos=True) for _ in range(16)]
    sinks = []
    for what in asked_:
        sinks.append(send(small_chunks, what))
        small_chunks.abort(what.request_id)
    assert {sink.done().finish_reason for sink in sinks} == {"cancelled"}
    assert small_chunks.stats() == {"running": 0, "waiting": 0}


def test_a_dead_engine_tells_everybody(small_chunks: Any, death: threading.Event, media: Media) -> None:
    """After all others of ``small_chunks``, because it takes the engine with it."""
    open_ = [send(small_chunks, request("hello", max_tokens=900, ignore_eos=True)) for _ in range(9)]
    open_[0].until(lambda sink: len(sink.ids) > 3)
    queued = asked(media, "audio")
    open_.append(send(small_chunks, queued))
    assert not death.is_set()
    (engine,) = small_chunks._llm.engine_core.resources.engine_manager.processes
    os.kill(engine.pid, signal.SIGKILL)
    for sink in open_:
        assert "engine process died" in str(sink.done().error)
    assert death.wait(TIMEOUT_S)
    assert isinstance(ask(small_chunks, request("hello")).error, StageError)
    with pytest.raises(OmniError):
        small_chunks.rows(queued.request_id, 0)
    assert small_chunks.stats() == {"running": 0, "waiting": 0}


def test_a_close_ends_what_is_open(model_config: ModelConfig) -> None:
    death = threading.Event()
    engine = start_vllm(model_config, death.set)
    process = engine._llm.engine_core.resources.engine_manager.processes[0]
    open_ = [send(engine, request("hello", max_tokens=900, ignore_eos=True)) for _ in range(9)]
    open_[0].until(lambda sink: len(sink.ids) > 3)
    engine.close()
    for sink in open_:
        assert "shutting down" in str(sink.done().error)
    process.join(TIMEOUT_S)  # vLLM kills what has not ended by itself after SHUTDOWN_S
    assert not process.is_alive()
    assert not death.is_set()
    engine.close()
