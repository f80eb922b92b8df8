#!/usr/bin/env python3
"""Compares the thinker through Triton gRPC with bare AsyncLLM: same checkpoint, prompts, sampling and arguments.

    scripts/bench_thinker.py --checkpoint checkpoints/demo --concurrency 1,16 --out docs/performance/thinker.json
    scripts/bench_thinker.py --checkpoint checkpoints/demo --config scripts/shapes/qwen3_omni_30b_a3b.json --parallel

The second one needs no weights: they are drawn at random in the shape of --config, and the checkpoint gives its
tokenizer and processor alone. vLLM's processes must find this package's plugin, so the package must be installed.

One system runs at a time, so that they do not share the machine; --parallel runs both, each on a GPU of its own. A
request counts its tokens as they arrive at the client: TTFT until the first, TPOT the mean time of each one after it.
CPU time is told apart for the process that holds AsyncLLM and for the engine's processes below it.

--limit-s ends what is not done by then; the rows that are there are written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from triton_omni.bench import report  # noqa: E402
from triton_omni.thinker.measure.figures import Run, Workload  # noqa: E402
from triton_omni.thinker.measure.systems import SYSTEMS, Setting  # noqa: E402

END_S = 15  # for a system that is told to end


def measure_one(args: argparse.Namespace) -> None:
    """In a process of its own: each row is a line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a server is stopped
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint
        if args.config:
            checkpoint = checkpoint_of_shape(args.checkpoint, args.config, Path(folder))
        setting = Setting(
            checkpoint=checkpoint,
            random_weights=args.config is not None,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            vllm_args=args.vllm_args,
            concurrency=args.concurrency,
            workload=Workload.of(args.tokens, args.rounds),
            log=args.log,
        )
        warm_up = iter([True])

        def tell(run: Run) -> None:
            if not next(warm_up, False):
                print(json.dumps(run.row(args.system)), flush=True)

        SYSTEMS[args.system](setting, tell)


def checkpoint_of_shape(source: Path, config: Path, folder: Path) -> Path:
    """``config`` as config.json, with the tokenizer and processor of ``source`` and no tensors."""
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").symlink_to(config.resolve())
    return folder


class Systems:
    """The processes that measure, and the rows that they have told so far."""

    def __init__(self, about: dict[str, Any], out: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._about, self._out = about, out
        self._lock = threading.Lock()

    def run(self, system: str, gpu: int | None, until_s: float) -> None:
        """Until it ends or ``until_s`` (of time.monotonic) has come."""
        env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": _gpu(gpu)})
        command = [sys.executable, __file__, *sys.argv[1:], "--system", system]
        began_s = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            reader = threading.Thread(target=self._read, args=(process, began_s))
            reader.start()
            try:
                process.wait(max(until_s - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                print(f"{system} was ended: its time was over", file=sys.stderr)
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            reader.join()
        if process.returncode:
            self.failed.append(system)

    def _read(self, process: subprocess.Popen[str], began_s: float) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            print(f"{time.monotonic() - began_s:.0f} s: {line}", end="", file=sys.stderr, flush=True)
            with self._lock:
                self.rows.append(json.loads(line) | self._about)
                self.write()

    def write(self) -> None:
        self.rows.sort(key=lambda row: (row["system"], row["concurrency"]))
        bare = {row["concurrency"]: row["tokens_per_s"] for row in self.rows if row["system"] == "bare"}
        for row in self.rows:
            if row["concurrency"] in bare:
                row["ratio"] = round(row["tokens_per_s"] / bare[row["concurrency"]], 3)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.rows, indent=1) + "\n")


def _gpu(number: int) -> str:
    """Of those that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="config.json of the shape that random weights are drawn in")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=4, help="requests per concurrent place")
    parser.add_argument("--tokens", default="40-200", help="answer tokens of a request: a number, or fewest-most")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--vllm-args", default="{}", help='JSON, for both systems: {"stream_interval": 4}')
    parser.add_argument("--parallel", action="store_true", help="both at once, Triton on the first of two GPUs")
    parser.add_argument("--limit-s", type=float, default=3600, help="all in all; one after the other, half for each")
    parser.add_argument("--log", type=Path, default=None, help="tritonserver's log")
    parser.add_argument("--out", type=Path, help="JSON file of rows, written anew")
    parser.add_argument("--system", choices=tuple(SYSTEMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    Workload.of(args.tokens, args.rounds)
    if args.system:
        measure_one(args)
        return 0
    about = {"gpu": report.gpus(), "commit": report.commit(), "vllm_args": args.vllm_args}
    about["command"] = " ".join(["scripts/bench_thinker.py", *sys.argv[1:]])
    systems, now_s = Systems(about, args.out), time.monotonic()
    if args.parallel:
        threads = [
            threading.Thread(target=systems.run, args=(system, gpu, now_s + args.limit_s))
            for gpu, system in enumerate(("triton", "bare"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        systems.run("bare", None, now_s + args.limit_s / 2)
        systems.run("triton", None, now_s + args.limit_s)
    print(json.dumps(systems.rows, indent=1))
    return 1 if systems.failed else 0


if __name__ == "__main__":
    sys.exit(main())
