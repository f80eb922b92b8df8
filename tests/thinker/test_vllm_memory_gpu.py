"""On a GPU: its memory runs out in the middle of answers; and the first answer in a form waits for no import."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.thinker.support import TIMEOUT_S, Answered, ask, png, request, send
from tests.thinker.test_vllm_rows_gpu import DEVICE, HIDDEN, SHAPES
from triton_omni.demo import checkpoint as demo
from triton_omni.demo.config import config as demo_config
from triton_omni.demo.tokenizer import write_processor
from triton_omni.errors import OmniError, StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerRequest
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker

log = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CONTEXT = 16_384
# 9216 patches of a large image times the encoder's width: 600 MB for one tensor. vLLM's own rehearsals, which leave
# memory in torch's cache, hold 512 tokens and no image.
LARGE, SMALL, PATCH = 1536, 64, 16
PATCHES = (LARGE // PATCH) ** 2
WIDE = {
    "text_config": {"max_position_embeddings": CONTEXT},
    "vision_config": {"intermediate_size": 32_768},
}
ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.1,
    "skip_mm_profiling": True,
    "max_num_batched_tokens": 512,
}
MIB = 1 << 20
LEFT_BYTES, PAGE_BYTES = 40 * MIB, 2 * MIB
ENDED_S = 20.0
FORM_S, FORM_TOKENS = 1.5, 5


@pytest.fixture(scope="module")
def death() -> threading.Event:
    """Set when ``thinker`` says that its engine process has died."""
    return threading.Event()


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, death: threading.Event) -> Iterator[Any]:
    """Random weights; images of LARGE pixels a side keep their size."""
    pytest.importorskip("vllm", exc_type=ImportError)
    out = tmp_path_factory.mktemp("wide")
    talker = {"talker_config": {"thinker_hidden_size": HIDDEN}}
    config = demo._merged(demo._merged(demo_config(), {"thinker_config": SHAPES} | talker), {"thinker_config": WIDE})
    (out / "config.json").write_text(json.dumps(config))
    write_processor(out)
    media = out / "preprocessor_config.json"
    media.write_text(json.dumps(json.loads(media.read_text()) | {"max_pixels": LARGE**2}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.getbasetemp() / "vllm"))
        settings = ThinkerConfig(
            engine="vllm", dtype="bfloat16", max_num_seqs=8, weights="random", vllm_args=json.dumps(ARGS)
        )
        started_s = time.monotonic()
        free_bytes()  # so that vLLM starts its process afresh: one that is forked could not use the GPU
        engine = load_thinker(ModelConfig.load(out), settings, death.set)
        log.info("started in %.1f s", time.monotonic() - started_s)
        yield engine
        engine.close()


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


@contextlib.contextmanager
def memory_taken() -> Iterator[None]:
    """All of the GPU's memory that is free, but LEFT_BYTES."""
    blocks: list[torch.Tensor] = []
    try:
        size = free_bytes() - LEFT_BYTES
        while size >= PAGE_BYTES:
            try:
                blocks.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
            except torch.OutOfMemoryError:
                size //= 2
            size = min(size, free_bytes() - LEFT_BYTES)
        log.info("took %d MiB in %d blocks", sum(map(len, blocks)) // MIB, len(blocks))
        log.info("%d MiB are free", free_bytes() // MIB)
        assert free_bytes() < 50 * MIB
        yield
    finally:
        blocks.clear()
        torch.cuda.empty_cache()


def seen(side: int, **changes: Any) -> ThinkerRequest:
    content = [{"type": "image", "media": 0}, {"type": "text", "text": "what is this?"}]
    return request(content, media=(png(np.zeros((side, side, 3), np.uint8)),), ignore_eos=True, **changes)


def form(key: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string", "minLength": 9}}, "required": [key]}
    return {"type": "json_schema", "json_schema": {"name": key, "schema": schema, "strict": True}}


def took_s(thinker: Any, what: ThinkerRequest) -> float:
    began_s = time.monotonic()
    assert len(ask(thinker, what).ids) == FORM_TOKENS
    return time.monotonic() - began_s


def test_the_first_answer_in_a_form_is_not_late(thinker: Any) -> None:
    forms = [took_s(thinker, request("hello", response_format=form(key), max_tokens=FORM_TOKENS)) for key in "ab"]
    free = took_s(thinker, request("hello", max_tokens=FORM_TOKENS, ignore_eos=True))
    log.info("%d tokens in a form: first %.3f s, second %.3f s; without one %.3f s", FORM_TOKENS, *forms, free)
    assert forms[0] < FORM_S


def test_no_memory_is_left_in_the_middle_of_answers(
    thinker: Any, death: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Last, because it takes the engine with it."""
    large = seen(LARGE, max_tokens=4, want_rows=True)
    assert ask(thinker, seen(SMALL, max_tokens=4)).finish_reason == "length"  # the encoder's kernels are there
    decoding = send(thinker, request("hello", max_tokens=CONTEXT - 100, ignore_eos=True))
    decoding.until(lambda sink: len(sink.ids) > 3)
    with memory_taken():
        before = len(decoding.ids)
        decoding.until(lambda sink: sink.ended or len(sink.ids) > before + 20)
        assert not decoding.ended, decoding.error
        began_s = time.monotonic()
        open_ = [decoding, send(thinker, large)]
        errors = [ended(sink) for sink in open_]
        ended_s = time.monotonic() - began_s
        assert death.wait(TIMEOUT_S)
        log.info("requests ended after %.2f s, the engine after %.2f s", ended_s, time.monotonic() - began_s)
        log.info("they were told: %s", errors[0].message)
        assert ended_s < ENDED_S
        assert len(open_[1].prompt) > PATCHES // 4
        assert all("out of memory" in error.message for error in errors)
        assert "out of memory" in caplog.text
    assert isinstance(ask(thinker, request("hello")).error, StageError)
    with pytest.raises(OmniError):
        thinker.rows(large.request_id, 0)
    assert thinker.stats() == {"running": 0, "waiting": 0}


def ended(sink: Answered) -> StageError:
    error = sink.done().error
    assert isinstance(error, StageError)
    return error
