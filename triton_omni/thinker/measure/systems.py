"""The two ways to a thinker that are compared: through Triton's gRPC, and bare AsyncLLM in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from triton_omni.thinker.measure.figures import Processes, Report, Run, Timing, Workload

ROOT = Path(__file__).resolve().parents[3]
READY_S = 1800


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What both systems are given. ``random_weights``: of the shape in the checkpoint's config.json."""

    checkpoint: Path
    random_weights: bool
    dtype: str
    max_num_seqs: int
    vllm_args: str
    concurrency: list[int]
    workload: Workload
    log: Path | None = None

    def turns(self) -> Iterator[tuple[int, Workload]]:
        """(concurrency, workload) in order, the one that warms up first."""
        yield max(self.concurrency), self.workload.warm_up
        yield from ((concurrency, self.workload) for concurrency in self.concurrency)


def run_triton(setting: Setting, report: Report) -> None:
    from triton_omni.serve.processes import model_stubs
    from triton_omni.serve.tritonserver import TritonServer

    with tempfile.TemporaryDirectory() as scratch:
        repository = _repository(setting, Path(scratch) / "repository")
        log = setting.log or Path(scratch) / "tritonserver.log"
        server = TritonServer(repository, checkpoint=setting.checkpoint, log_path=log)
        with server:
            server.wait_ready(READY_S)
            (stub,) = (stub.pid for stub in model_stubs(server.pid) if "'thinker'" in stub.name)
            measure_triton(server.grpc_target, stub, setting, report)


def measure_triton(grpc_target: str, stub_pid: int, setting: Setting, report: Report) -> None:
    """Of a tritonserver that runs; ``stub_pid``: the thinker's process."""
    import tritonclient.grpc as grpc

    processes = Processes.of(stub_pid)
    clients = [grpc.InferenceServerClient(grpc_target) for _ in range(max(setting.concurrency))]
    for concurrency, workload in setting.turns():
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for client in clients[:concurrency]:
            free.put(client)

        def one(number: int, workload: Workload = workload, free: Any = free) -> Timing:
            client = free.get()
            try:
                return _ask_triton(client, workload, number)
            finally:
                free.put(client)

        start_s, before = time.perf_counter(), processes.cpu_time()
        with ThreadPoolExecutor(concurrency) as threads:
            timings = list(threads.map(one, range(workload.requests(concurrency))))
        wall_s = time.perf_counter() - start_s
        report(Run(concurrency, wall_s, processes.cpu_time().since(before), timings))


def _repository(setting: Setting, target: Path) -> Path:
    """The thinker alone has weights."""
    from triton_omni.serve.repository import render

    engine = {"engine": "vllm", "dtype": setting.dtype, "max_num_seqs": str(setting.max_num_seqs)}
    engine |= {"vllm_args": setting.vllm_args, "weights": "random" if setting.random_weights else "checkpoint"}
    null = {"engine": "null"}
    render(ROOT / "model_repository", target, {"thinker": engine, "talker": null, "code2wav": null}, {})
    return target


def _ask_triton(client: Any, workload: Workload, number: int) -> Timing:
    import numpy as np
    import tritonclient.grpc as grpc

    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sampling = {"temperature": 0, "max_tokens": workload.tokens(number), "ignore_eos": True}
    text = json.dumps({"messages": workload.messages(number), "sampling": sampling})
    tensor = grpc.InferInput("REQUEST", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text], np.object_))
    start_s = time.perf_counter()
    client.start_stream(lambda result, error: arrived.put(error or result))
    client.async_stream_infer("thinker", [tensor], enable_empty_final_response=True)
    tokens, first_s = 0, 0.0
    while True:
        result = arrived.get(timeout=600)
        if isinstance(result, Exception):
            raise result
        response = result.get_response()
        if any(output.name == "TOKEN_IDS" for output in response.outputs):
            tokens += result.as_numpy("TOKEN_IDS").size
            first_s = first_s or (time.perf_counter() - start_s if tokens else 0.0)
        if response.parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return Timing(first_s, time.perf_counter() - start_s, tokens)


def run_bare(setting: Setting, report: Report) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from transformers import AutoProcessor
    from vllm.v1.engine.async_llm import AsyncLLM

    processor = AutoProcessor.from_pretrained(setting.checkpoint)

    async def measure() -> None:
        engine = AsyncLLM.from_engine_args(bare_engine_args(setting))
        processes = Processes.of(os.getpid())
        for turn, (concurrency, workload) in enumerate(setting.turns()):
            ask = _asker(engine, processor, workload, f"turn-{turn}")
            start_s, before = time.perf_counter(), processes.cpu_time()
            timings = await _all(ask, workload.requests(concurrency), concurrency)
            wall_s = time.perf_counter() - start_s
            report(Run(concurrency, wall_s, processes.cpu_time().since(before), timings))
        engine.shutdown()

    asyncio.run(measure())


def bare_engine_args(setting: Setting) -> Any:
    """As ``vllm_args.engine_args`` has them, less what makes vLLM's thinker ours."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from triton_omni.model_config import ModelConfig
    from triton_omni.thinker.vllm_args import CPU_KV_CACHE_BYTES, graph_options
    from triton_omni.thinker.vllm_plugin import RANDOM_WEIGHTS

    options: dict[str, Any] = {
        "model": str(setting.checkpoint),
        "dtype": setting.dtype,
        "max_model_len": ModelConfig.load(setting.checkpoint).context_tokens,
        "max_num_seqs": setting.max_num_seqs,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if setting.random_weights:
        options["load_format"] = RANDOM_WEIGHTS
    if current_platform.device_type == "cpu":
        options["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    given = json.loads(setting.vllm_args)
    return AsyncEngineArgs(**(options | graph_options(given, setting.max_num_seqs) | given))


def _asker(engine: Any, processor: Any, workload: Workload, name: str) -> Callable[[int], Any]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def ask(number: int) -> Timing:
        messages = workload.messages(number)
        start_s, first_s, tokens = time.perf_counter(), 0.0, 0
        prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        params = SamplingParams(
            temperature=0,
            max_tokens=workload.tokens(number),
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in engine.generate({"prompt": prompt}, params, f"{name}-{number}"):
            tokens += len(output.outputs[0].token_ids)
            first_s = first_s or time.perf_counter() - start_s
        return Timing(first_s, time.perf_counter() - start_s, tokens)

    return ask


async def _all(ask: Callable[[int], Any], requests: int, concurrency: int) -> list[Timing]:
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int) -> Timing:
        async with slots:
            timing: Timing = await ask(number)
            return timing

    return list(await asyncio.gather(*(one(number) for number in range(requests))))


SYSTEMS: dict[str, Callable[[Setting, Report], None]] = {"bare": run_bare, "triton": run_triton}
