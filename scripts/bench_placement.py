#!/usr/bin/env python3
"""What the talker and code2wav cost each other where they share a GPU, without Triton and without weights.

    scripts/bench_placement.py                                      # true shape, random weights, one GPU: 100 seconds
    scripts/bench_placement.py --checkpoint DIR --device cpu ...    # a checkpoint's engines, on CPU

As in the server each engine is a process of its own, with its CUDA graphs. Cases: each alone; both together, where a
GPU gives its time to one process after the other; both together under CUDA's Multi-Process Service, where it runs the
kernels of both at once; and, where there is a second GPU, each on its own. The talker makes step after step; code2wav
is called "paced": with all sessions when the talker has made their 25 frames, "spread": with a quarter of the sessions
four times as often, or "unthrottled": without a pause. A step is the time from one step's codes on the host to the
next one's, a call that from codes to samples on the host; both count only while both processes are at work.

The thinker is not part of it: what code2wav costs beside it is told by serving both (scripts/sweep.sh).

Prints a table and writes it to docs/performance/placement.json, after each case, so that a stopped run is not lost.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from triton_omni.bench import report
from triton_omni.bench.placement.cases import APART, MPS, measure_all
from triton_omni.bench.placement.loads import Limit, Settings
from triton_omni.model_config import ModelConfig
from triton_omni.serve.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"
HEADER = "case      pace         process   batch beside  steps    p50 ms    p99 ms   steps/s  audio s/s"


def main() -> None:
    options = arguments()
    limit = Limit.after(options.limit_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes and MPS end too
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms  %(message)s")
    if options.checkpoint is not None:
        model = ModelConfig.load(options.checkpoint)
    else:
        model = ModelConfig(SHAPE, json.loads(SHAPE.read_text(encoding="utf-8")), {})
    settings = Settings(
        model=model,
        device=options.device,
        weights="random" if options.checkpoint is None else "checkpoint",
        batches=tuple(options.batches),
        context=options.context,
        frames=options.frames,
        chunk_frames=options.chunk_frames,
    )
    said = {"commit": options.commit, "command": shlex.join(["scripts/bench_placement.py", *sys.argv[1:]])}
    left_out: dict[str, str] = {}
    apart = options.device != "cpu" and len(Machine.detect().devices) > 1
    if not apart:
        left_out[APART] = "there is no second GPU"
    if options.no_mps or options.device == "cpu":
        left_out[MPS] = "not asked for"
    rows: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    try:
        for measured in measure_all(
            settings, limit, options.case_s, apart=apart, under_mps=MPS not in left_out, left_out=left_out
        ):
            for row in measured:
                rows.append(report.rounded(row) | said)
                print(line(row), flush=True)
            write(options.out, rows, left_out)
    finally:
        write(options.out, rows, left_out)
    for case, reason in left_out.items():
        print(f"not measured: {case}: {reason}")
    print(f"wrote {options.out}, {options.limit_s - limit.left_s:.0f} s")


FIGURES = ("p50_ms", "p99_ms", "steps_per_s", "audio_s_per_s")


def line(row: dict[str, Any]) -> str:
    shown = [row["case"], row["pace"] or "-", row["process"], row["batch"], row["beside"] or "-", row["steps"]]
    values = ["-" if row[key] is None else f"{row[key]:.2f}" for key in FIGURES]
    return "{:9} {:12} {:9} {:5} {:>6} {:6}".format(*shown) + "".join(f"{value:>10}" for value in values)


def write(out: Path, rows: list[dict[str, Any]], left_out: dict[str, str]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": rows, "left_out": left_out}, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="use its weights instead of random ones of the true shape")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--context", type=int, default=512, help="rows of a talker's slot, in the middle of a case")
    parser.add_argument("--frames", type=int, default=400, help="of each session in a case")
    parser.add_argument("--chunk-frames", type=int, default=25, help="of each row of a call of code2wav")
    parser.add_argument("--case-s", type=float, default=3.0, help="most of a case")
    parser.add_argument("--limit-s", type=float, default=100.0, help="of the whole run; what is left then is left out")
    parser.add_argument("--no-mps", action="store_true", help="leave that case out")
    parser.add_argument("--commit", default=report.commit())
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance" / "placement.json")
    options = parser.parse_args()
    if options.device == "cpu" and options.checkpoint is None:
        parser.error("the true shape needs a GPU; name a --checkpoint to measure on CPU")
    if min(options.batches) < 1 or options.context - options.frames // 2 < 12:
        parser.error("--batches must be at least 1, --context at least half of --frames and 12 rows of prompt")
    return options


if __name__ == "__main__":
    main()
