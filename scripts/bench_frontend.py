#!/usr/bin/env python3
"""What the OpenAI frontend costs: the same load through it and straight to omni_bls, in turns, with null engines.

    scripts/bench_frontend.py                                    # 5 rounds at c = 32: some minutes, no GPU
    scripts/bench_frontend.py --token-ms 1 --frame-ms 0.5        # engines that never are what one waits for
    scripts/bench_frontend.py --rounds 3 --out -                 # prints only
    scripts/bench_frontend.py --limit-s 120                      # as many rounds as there is time for
    scripts/bench_frontend.py --workers 4 --concurrency 16       # and how many requests each worker gets

Server, frontend and client share this machine: where it is saturated, what the frontend takes is missing elsewhere.
Writes docs/performance/frontend.json: every run, and the medians with their ratio. Runs with any Python that has the
packages, also where this project is not installed: python3 scripts/bench_frontend.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from prometheus_client.mmap_dict import MmapedDict  # noqa: E402

from triton_omni.bench import report  # noqa: E402
from triton_omni.bench.command_line import measure, parser  # noqa: E402
from triton_omni.serve.frontend import FrontendProcess  # noqa: E402
from triton_omni.serve.repository import render  # noqa: E402
from triton_omni.serve.tritonserver import TritonServer, free_ports  # noqa: E402

OUT = ROOT / "docs" / "performance" / "frontend.json"
MODEL = "null"
FIGURES = ("req_s", "chunks_per_s", "audio_s_per_s", "ttft_ms", "ttfp_ms", "e2e_ms", "rtf", "client_cpu")
KEPT = (*FIGURES, "completed", "failed", "text_chunks", "audio_chunks", "ttft_p99_ms", "ttfp_p99_ms", "e2e_p99_ms")
# The medians that are written.
TOLD = (*FIGURES, "text_chunks", "audio_chunks", "frontend_cpu_ms", "triton_cpu_ms")
# For server, frontend and clients to end.
END_S = 15.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TimeIsUp(BaseException):
    """The limit has come."""


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Leaves the block when the time is over, wherever it is."""

    def end(number: int, frame: Any) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.001))
    try:
        yield
    except TimeIsUp:
        print("the time is up: what was measured by now counts", file=sys.stderr)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def cpu_s(pid: int) -> float:
    """User and system time of a process and of what it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lists = [thread.read_text().split() for thread in Path(f"/proc/{pid}/task").glob("*/children")]
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S + sum(cpu_s(int(child)) for c in lists for child in c)


def answered(directory: Path) -> list[int]:
    """Chats that each worker has answered; ``directory``: of the frontend's temporary files. One worker has none."""
    return [
        sum(
            int(count)
            for key, count, *_ in MmapedDict.read_all_values_from_file(file)
            if "requests_total" in key and "chat/completions" in key
        )
        for file in sorted(directory.glob("openai_frontend_*/counter_*.db"))
    ]


def run(api: str, url: str, options: argparse.Namespace, pids: dict[str, int], directory: Path) -> dict[str, Any]:
    """One run's figures, what each process spent on a request, and how many each worker of the frontend answered."""
    arguments = ["run", "--api", api, "--url", url, "--model", MODEL, "--concurrency", str(options.concurrency)]
    arguments += ["--requests", str(options.requests), "--gpus", "none"]
    before_s, before = {name: cpu_s(pid) for name, pid in pids.items()}, answered(directory)
    (row,) = measure(parser().parse_args(arguments), "", lambda row: None)
    sent = options.requests + options.concurrency  # the warm-ups, too
    spent: dict[str, Any] = {f"{name}_cpu_ms": (cpu_s(pid) - before_s[name]) / sent * 1e3 for name, pid in pids.items()}
    if api == "openai" and before:
        spread = [now - then for now, then in zip(answered(directory), before, strict=True)]
        spent["requests_of_workers"] = sorted(spread, reverse=True)
    return report.rounded({"api": api, **{key: row[key] for key in KEPT}, **spent, "load": os.getloadavg()[0]})


def demo_checkpoint(directory: Path) -> Path:
    from triton_omni.demo.checkpoint import write_checkpoint  # its torch and transformers are needed for nothing else

    write_checkpoint(directory)
    return directory


def compare(options: argparse.Namespace, directory: Path, end_s: float) -> list[dict[str, Any]]:
    """Runs in turns against one tritonserver, as many as there is time for until ``end_s`` (``time.monotonic()``)."""
    checkpoint = options.checkpoint or demo_checkpoint(directory / "demo")
    paces = {
        "thinker": {"null_token_ms": options.token_ms},
        "talker": {"null_frame_ms": options.frame_ms},
        "code2wav": {},
    }
    engines = {stage: {"engine": "null", **pace} for stage, pace in paces.items()}
    render(ROOT / "model_repository", directory / "repository", engines, {})
    server = TritonServer(directory / "repository", checkpoint=checkpoint, log_path=directory / "tritonserver.log")
    (port,) = free_ports(1)
    arguments = ["--port", str(port), "--triton-url", server.grpc_target, "--checkpoint", str(checkpoint)]
    arguments += ["--model-name", MODEL, "--workers", str(options.workers)]
    os.environ["TMPDIR"] = str(directory)
    frontend = FrontendProcess(
        f"http://127.0.0.1:{port}", arguments, log_path=directory / "frontend.log", drain_s=options.drain_s
    )
    runs = []
    with server, frontend, within(end_s - time.monotonic()):
        server.wait_ready(options.ready_timeout_s)
        frontend.wait_ready(options.ready_timeout_s)
        while options.workers > 1 and len(answered(directory)) < options.workers:
            time.sleep(0.1)  # one that answers makes it ready
        pids = {"frontend": frontend.pid, "triton": server.pid}
        for _ in range(options.rounds):
            for api, url in (("openai", frontend.url), ("grpc", server.grpc_target)):
                runs.append(run(api, url, options, pids, directory))
                print(json.dumps(runs[-1]), flush=True)
    return runs


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by way, and the frontend's as a share of omni_bls's own where both were measured."""
    ways = {api: [run for run in runs if run["api"] == api] for api in ("openai", "grpc")}
    medians = {
        api: {key: round(statistics.median(run[key] for run in measured), 4) for key in TOLD}
        for api, measured in ways.items()
        if measured
    }
    ratios = {
        key: round(medians["openai"][key] / medians["grpc"][key], 3) for key in FIGURES[:3] if len(medians) == len(ways)
    }
    return {"medians": medians, "frontend_over_grpc": ratios}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = arguments.add_argument
    add("--concurrency", type=int, default=32)
    add("--requests", type=int, default=160, help="of each run")
    add("--workers", type=int, default=1, help="of the frontend")
    add("--rounds", type=int, default=5, help="of one run each way")
    add("--checkpoint", type=Path, help="whose voices and tokens the null engines pretend to have; none: a demo one")
    add("--token-ms", default="10", help="of the null thinker, for a token of one answer")
    add("--frame-ms", default="5", help="of the null talker, for 80 ms of one answer's speech")
    add("--ready-timeout-s", type=float, default=300.0, help="how long the server may take to start")
    add("--drain-s", type=float, default=2.0)
    add("--limit-s", type=float, default=3600.0, help=f"of all; the last {END_S:g} s of it are for ending")
    add("--out", default=str(OUT), help="file to write; -: none")
    options = arguments.parse_args()
    if options.limit_s <= END_S:
        arguments.error(f"--limit-s: must be more than {END_S:g}, got {options.limit_s:g}")
    end_s = time.monotonic() + options.limit_s - END_S
    with tempfile.TemporaryDirectory(prefix="bench_frontend_") as directory:
        runs = compare(options, Path(directory), end_s)
    if not runs:
        sys.exit(f"bench_frontend.py: no run ended within --limit-s {options.limit_s:g}")
    told = {
        "command": shlex.join(["scripts/bench_frontend.py", *sys.argv[1:]]),
        "commit": report.commit(),
        "cpus": len(os.sched_getaffinity(0)),
        "concurrency": options.concurrency,
        "workers": options.workers,
        "null_token_ms": float(options.token_ms),
        "null_frame_ms": float(options.frame_ms),
        **summary(runs),
        "runs": runs,
    }
    if options.out != "-":
        Path(options.out).write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({key: told[key] for key in ("medians", "frontend_over_grpc")}, indent=1))


if __name__ == "__main__":
    main()
