"""Compares the thinker through Triton gRPC with bare AsyncLLM: same checkpoint, prompts, sampling and arguments.

    scripts/bench_thinker.py --checkpoint checkpoints/demo --concurrency 1,16 --out docs/performance/thinker.json
    scripts/bench_thinker.py --checkpoint checkpoints/demo --config scripts/shapes/qwen3_omni_30b_a3b.json

The second one needs no weights: they are drawn at random in the shape of --config, and the checkpoint gives its
tokenizer and processor alone. vLLM's processes must find this package's plugin, so the package must be installed.

One system runs at a time, so that they do not share the machine. A request counts its tokens as they arrive at the
client: TTFT until the first, TPOT the mean time of each one after it. The CPU time is that of the one process that
holds AsyncLLM, per token: what is spent beside the engine's own processes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds until the first token, until the last, and how many there were."""

    first_s: float
    total_s: float
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """All requests of one concurrency."""

    concurrency: int
    wall_s: float
    process_s: float
    timings: list[Timing]


Report = Callable[[Run], None]


def process_s(pid: int) -> float:
    """CPU time of a process so far, all its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {number}: tell me all you know of the number {number}."}]


def run_triton(args: argparse.Namespace, report: Report) -> None:
    import numpy as np
    import tritonclient.grpc as grpc

    from triton_omni.serve.processes import model_stubs
    from triton_omni.serve.repository import render
    from triton_omni.serve.tritonserver import TritonServer

    def ask(client: Any, number: int) -> Timing:
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        sampling = {"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
        text = json.dumps({"messages": messages(number), "sampling": sampling})
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

    with tempfile.TemporaryDirectory() as scratch:
        engine = {"engine": "vllm", "dtype": args.dtype, "max_num_seqs": str(args.max_num_seqs)}
        engine |= {"vllm_args": args.vllm_args, "weights": "random" if args.config else "checkpoint"}
        null = {"engine": "null"}
        parameters = {"thinker": engine, "talker": null, "code2wav": null}
        render(ROOT / "model_repository", Path(scratch) / "repository", parameters, {})
        server = TritonServer(
            Path(scratch) / "repository",
            checkpoint=args.checkpoint,
            log_path=args.log or Path(scratch) / "tritonserver.log",
        )
        with server:
            server.wait_ready(1800)
            (stub,) = (stub.pid for stub in model_stubs(server.pid) if "'thinker'" in stub.name)
            clients = [grpc.InferenceServerClient(server.grpc_target) for _ in range(max(args.concurrency))]
            for concurrency in (1, *args.concurrency):  # the first one warms up
                free: queue.SimpleQueue[Any] = queue.SimpleQueue()
                for client in clients[:concurrency]:
                    free.put(client)

                def one(number: int, free: Any = free) -> Timing:
                    client = free.get()
                    try:
                        return ask(client, number)
                    finally:
                        free.put(client)

                start_s, spent_s = time.perf_counter(), process_s(stub)
                with ThreadPoolExecutor(concurrency) as threads:
                    timings = list(threads.map(one, range(args.rounds * concurrency)))
                report(Run(concurrency, time.perf_counter() - start_s, process_s(stub) - spent_s, timings))


def run_bare(args: argparse.Namespace, report: Report) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import torch
    from transformers import AutoProcessor
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from triton_omni.thinker.vllm_args import CPU_KV_CACHE_BYTES
    from triton_omni.thinker.vllm_plugin import RANDOM_WEIGHTS

    options = {"model": str(args.checkpoint), "dtype": args.dtype, "max_num_seqs": args.max_num_seqs}
    options |= {"generation_config": "vllm", "disable_log_stats": True} | json.loads(args.vllm_args)
    if args.config:
        options["load_format"] = RANDOM_WEIGHTS
    if not torch.cuda.is_available():
        options.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    processor = AutoProcessor.from_pretrained(args.checkpoint)

    async def measure() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        params = SamplingParams(
            temperature=0, max_tokens=args.tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        async def ask(number: int, slots: asyncio.Semaphore, name: str) -> Timing:
            prompt = processor.apply_chat_template(messages(number), tokenize=False, add_generation_prompt=True)
            async with slots:
                start_s, first_s, tokens = time.perf_counter(), 0.0, 0
                async for output in engine.generate({"prompt": prompt}, params, f"{name}-{number}"):
                    tokens += len(output.outputs[0].token_ids)
                    first_s = first_s or time.perf_counter() - start_s
                return Timing(first_s, time.perf_counter() - start_s, tokens)

        for turn, concurrency in enumerate((1, *args.concurrency)):
            slots, start_s, spent_s = asyncio.Semaphore(concurrency), time.perf_counter(), time.process_time()
            asked = (ask(number, slots, str(turn)) for number in range(args.rounds * concurrency))
            timings = await asyncio.gather(*asked)
            report(Run(concurrency, time.perf_counter() - start_s, time.process_time() - spent_s, list(timings)))
        engine.shutdown()

    asyncio.run(measure())


def row(system: str, run: Run) -> dict[str, Any]:
    tokens = sum(timing.tokens for timing in run.timings)
    tpot = [(timing.total_s - timing.first_s) / max(timing.tokens - 1, 1) for timing in run.timings]
    return {
        "system": system,
        "concurrency": run.concurrency,
        "tokens_per_s": round(tokens / run.wall_s, 1),
        "ttft_ms": round(1000 * statistics.median(timing.first_s for timing in run.timings), 2),
        "tpot_ms": round(1000 * statistics.median(tpot), 3),
        "process_us_per_token": round(1e6 * run.process_s / tokens, 1),
    }


def measure_one(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def report(run: Run) -> None:
        rows.append(row(args.system, run))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    {"triton": run_triton, "bare": run_bare}[args.system](args, report)
    return rows[1:]  # without the warm-up


def checkpoint_of_shape(source: Path, config: Path, folder: Path) -> Path:
    """``config`` as config.json, with the tokenizer and processor of ``source`` and no tensors."""
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").symlink_to(config.resolve())
    return folder


def described() -> dict[str, str | None]:
    """Where and how the rows came to be."""
    import torch

    from triton_omni.bench import report

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "commit": report.commit(),
        "command": " ".join(["scripts/bench_thinker.py", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="config.json of the shape that random weights are drawn in")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=2, help="requests per concurrent place")
    parser.add_argument("--tokens", type=int, default=128, help="answer tokens of each request")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--vllm-args", default="{}", help='JSON, for both systems: {"stream_interval": 4}')
    parser.add_argument("--log", type=Path, default=None, help="tritonserver's log")
    parser.add_argument("--out", type=Path, help="JSON file of rows, written anew")
    parser.add_argument("--system", choices=("triton", "bare"), help="only this one")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.system:
        with tempfile.TemporaryDirectory() as folder:
            if args.config:
                args.checkpoint = checkpoint_of_shape(args.checkpoint, args.config, Path(folder))
            print(json.dumps(measure_one(args)))
        return
    rows: list[dict[str, Any]] = []
    for system in ("bare", "triton"):
        command = [sys.executable, __file__, *sys.argv[1:], "--system", system]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.strip().splitlines()[-1])
    about = described()
    rows = [one | about | {"vllm_args": args.vllm_args} for one in rows]
    bare = {one["concurrency"]: one["tokens_per_s"] for one in rows if one["system"] == "bare"}
    for one in rows:
        one["ratio"] = round(one["tokens_per_s"] / bare[one["concurrency"]], 3)
    text = json.dumps(rows, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
