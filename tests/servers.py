"""Real tritonservers, each started once for all tests that use it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from triton_omni.serve.repository import render
from triton_omni.serve.tritonserver import TritonServer

REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"
READY_TIMEOUT_S = 500

MakeServer = Callable[..., TritonServer]


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> MakeServer:
    """A TritonServer over a rendered repository, not started: ``null`` engines or real ones."""

    def make(
        parameters: dict[str, dict[str, str]], instances: dict[str, int], *, null: bool, **options: Any
    ) -> TritonServer:
        target = tmp_path_factory.mktemp("triton")
        engines = {"engine": "null"} if null else {}
        stages = {model: engines | parameters.get(model, {}) for model in ("thinker", "talker", "code2wav")}
        render(REPOSITORY, target / "repository", parameters | stages, instances)
        options = {"checkpoint": checkpoint} | options
        return TritonServer(target / "repository", log_path=target / "tritonserver.log", **options)

    return make


def _serve(server: TritonServer) -> Iterator[TritonServer]:
    with server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server


@pytest.fixture(scope="session")
def null_server(make_server: MakeServer) -> Iterator[TritonServer]:
    """Fast null engines; omni_bls as it is shipped."""
    fast = {"thinker": {"null_token_ms": "5", "null_prefill_ms": "2"}, "talker": {"null_frame_ms": "1"}}
    yield from _serve(make_server(fast, {}, null=True))


@pytest.fixture(scope="session")
def tight_server(make_server: MakeServer) -> Iterator[TritonServer]:
    """Slow null engines with few places: two speak, four run, two wait; text ends after 0.2 s, speech after 40."""
    few = {
        "thinker": {"null_answer_tokens": "20", "null_token_ms": "10"},
        "talker": {"max_sessions": "2", "null_frame_ms": "40", "null_frames_per_token": "50"},
        "omni_bls": {"max_requests": "4", "max_waiting": "2"},
    }
    yield from _serve(make_server(few, {"omni_bls": 1}, null=True))


@pytest.fixture(scope="session", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def demo_server(make_server: MakeServer, request: pytest.FixtureRequest) -> Iterator[TritonServer]:
    """The real engines on the demo checkpoint, float32; the thinker on transformers, then on vLLM."""
    if request.param == "vllm":
        pytest.importorskip("vllm", exc_type=ImportError)
    float32 = {"dtype": "float32"}
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "skip_mm_profiling": True}
    thinker = float32 | {"engine": request.param, "vllm_args": json.dumps(small)}
    yield from _serve(make_server({"thinker": thinker, "talker": float32, "code2wav": float32}, {}, null=False))


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Ask until the answer is empty (or 0); metrics are what a client can watch, and they have no events."""

    def wait(ask: Callable[[], Any], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while left := ask():
            assert time.monotonic() < deadline_s, f"after {within_s:g} s: {left}"
            time.sleep(0.02)

    return wait
