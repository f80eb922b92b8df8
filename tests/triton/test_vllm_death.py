"""vLLM's engine process dies under tritonserver: nobody waits for it, and nobody takes the thinker for ready."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from openai_frontend.triton_client import TritonEngine
from tests.servers import READY_TIMEOUT_S, MakeServer
from tests.triton.client import HELLO, TritonCall, omni
from triton_omni.serve.processes import child_pids, model_stubs
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.vllm, pytest.mark.slow]
WAIT_S = 120
ENDLESS = {"ignore_eos": True, "max_tokens": 4000}


@pytest.fixture(scope="module")
def server(make_server: MakeServer) -> Iterator[TritonServer]:
    """The thinker on vLLM, the others without weights."""
    pytest.importorskip("vllm", exc_type=ImportError)
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "skip_mm_profiling": True}
    thinker = {"engine": "vllm", "dtype": "float32", "max_model_len": "4096", "vllm_args": json.dumps(small)}
    others = {"engine": "null"}
    parameters = {"thinker": thinker, "talker": others, "code2wav": others}
    with make_server(parameters, {"omni_bls": 1}, null=False) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server


def engine_process(stub: int) -> int:
    (found,) = (pid for pid in child_pids(stub) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


async def becomes(frontend: TritonEngine, waited_for: list[str]) -> None:
    """It gives each model 2 s to answer, which on a busy machine may not be enough."""
    deadline_s = time.monotonic() + WAIT_S
    while (found := await frontend.waiting_for()) != waited_for:
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.1)


def test_a_prompt_that_is_too_long_names_the_field(server: TritonServer) -> None:
    long = {"messages": [{"role": "user", "content": "far " * 5000}], "modalities": ["text"]}
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[messages\]: make a prompt of \d+ tokens"):
        list(omni(server, long))


@pytest.mark.asyncio
async def test_the_engine_dies_in_the_middle_of_answers(server: TritonServer) -> None:
    """Last, because it takes the server with it."""
    frontend = TritonEngine(server.grpc_target, stall_timeout_s=WAIT_S)
    await becomes(frontend, [])
    (stub,) = (stub.pid for stub in model_stubs(server.pid) if "'thinker'" in stub.name)
    request = {"messages": HELLO, "modalities": ["text"], "thinker": ENDLESS}
    through_bls = [iter(omni(server, request)) for _ in range(3)]
    direct = iter(TritonCall(server, "thinker", {"REQUEST": [json.dumps({"messages": HELLO, "sampling": ENDLESS})]}))
    for each in (*through_bls, direct):
        while not next(each)["TEXT" if each is not direct else "PROMPT_TOKEN_IDS"].size:
            pass
    process = os.pidfd_open(stub)
    os.kill(engine_process(stub), signal.SIGKILL)
    for each in (*through_bls, direct):
        with pytest.raises(InferenceServerException, match=r"^stage_failed \[thinker\]: the engine process died"):
            list(each)
    assert select.select([process], [], [], WAIT_S)[0], "the model's process does not end with its engine"
    os.close(process)
    await becomes(frontend, ["thinker"])
    await frontend.close()
    with pytest.raises(InferenceServerException, match=r"^stage_failed \[thinker\]: "):
        list(omni(server, request))
