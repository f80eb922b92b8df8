#!/usr/bin/env python3
"""How fast the talker's engine is, without Triton and without a checkpoint's weights.

    scripts/bench_talker.py                                   # true shape, random weights, one GPU: about 2 minutes
    scripts/bench_talker.py --checkpoint checkpoints/demo ... # another talker; also on CPU

    scripts/bench_talker.py --parts bursts                    # one part; the others in --out stay as they are

Prints a table and writes it to docs/performance/talker.json: sessions in lockstep by batch and context, sessions that
arrive at random and hear their text at a thinker's pace, sessions that all arrive at once, and of single steps what
each change bought and a profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from triton_omni.bench import report
from triton_omni.model_config import ModelConfig
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.factory import load_runner, make_runner, wants_graphs
from triton_omni.talker.measure.burst import Burst, burst
from triton_omni.talker.measure.sessions import Row, StepClock, WatchedEngine, arrivals, lockstep, used_gib
from triton_omni.talker.random_weights import random_talker
from triton_omni.talker.shape import TalkerShape

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"


def build(options: argparse.Namespace) -> tuple[Any, ModelConfig, TalkerConfig]:
    """A runner of a checkpoint, or of the true shape with random weights."""
    sessions = max(*options.batches, options.concurrency)
    config = TalkerConfig(
        max_sessions=sessions,
        max_context=max(options.contexts) + options.frames,
        buckets=tuple(sorted({*options.batches, sessions})),
        prefill_chunk=max(options.prefill_chunks),
        device=options.device,
    )
    if options.checkpoint is not None:
        model = ModelConfig.load(options.checkpoint)
        return load_runner(model, config), model, config
    model = ModelConfig(SHAPE, json.loads(SHAPE.read_text(encoding="utf-8")), {})
    shape, device = TalkerShape.read(model), config.torch_device()
    dtype = config.torch_dtype(device)
    with torch.inference_mode():
        talker = random_talker(shape, device, dtype)
        graphed = wants_graphs(shape, config, device)
        return make_runner(talker, config, device, dtype, graphed=graphed), model, config


def main() -> None:
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms  %(message)s")
    runner, model, config = build(options)
    said = {
        "gpu": torch.cuda.get_device_name() if runner.slots.device.type == "cuda" else "none",
        "commit": options.commit,
        "command": shlex.join(["scripts/bench_talker.py", *sys.argv[1:]]),
    }
    print(f"{said['gpu']}, torch {torch.__version__}, {used_gib()} GiB in use", flush=True)
    result = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    for part in options.parts:
        for section, rows in PARTS[part](options, runner, model, config).items():
            result[section] = [row | said for row in rows] if part != "kernels" else rows
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")


Sections = dict[str, list[Row]]


def in_lockstep(options: argparse.Namespace, runner: Any, model: ModelConfig, config: TalkerConfig) -> Sections:
    rows = []
    clock = StepClock(runner)
    engine = LocalTalkerEngine(runner, config)
    print("batch context  ms/frame     p99    step  idle us  frames/s", flush=True)
    for batch in options.batches:
        for context in options.contexts:
            row = lockstep(engine, model, clock, batch, context, options.frames)
            rows.append(row)
            shown = (row[k] for k in ("batch", "context", "ms_per_frame", "p99_ms", "step_ms", "idle_gap_us"))
            print("{:5} {:7} {:9.3f} {:7.3f} {:7.3f} {:8.1f}".format(*shown), f"{row['frames_per_s']:9.1f}", flush=True)
    engine.close()
    return {"rows": rows}


def at_random(options: argparse.Namespace, runner: Any, model: ModelConfig, config: TalkerConfig) -> Sections:
    rows = []
    for chunk in options.prefill_chunks:
        watched = WatchedEngine(runner, dataclasses.replace(config, prefill_chunk=chunk))
        row = arrivals(watched, model, options.requests, options.concurrency, options.frames, options.prompt_rows)
        watched.close()
        rows.append({"prefill_chunk": chunk, **row})
        print("arrivals", json.dumps(rows[-1]), flush=True)
    return {"arrivals": rows}


def in_bursts(options: argparse.Namespace, runner: Any, model: ModelConfig, config: TalkerConfig) -> Sections:
    rows: list[Row] = []
    for spread_ms, lead_ms in itertools.product(options.spreads_ms, options.prompt_leads_ms):
        for chunks in options.prefill_chunks_per_step:
            given = Burst(
                sessions=options.concurrency,
                rounds=options.rounds,
                rows=options.burst_rows,
                frames=options.frames,
                spread_s=spread_ms / 1e3,
                lead_s=lead_ms / 1e3,
                chunk_frames=tuple(options.chunk_frames),
            )
            rows.append(burst(runner, dataclasses.replace(config, prefill_chunks_per_step=chunks), model, given))
            print("burst", json.dumps(rows[-1]), flush=True)
    return {"bursts": rows}


def of_kernels(options: argparse.Namespace, runner: Any, model: ModelConfig, config: TalkerConfig) -> Sections:
    found: Sections = {"prefill": [], "steps_of_the_way": [], "profile": []}
    if not hasattr(runner, "fused"):
        return found
    from triton_omni.talker.measure.steps import prefill_times, profile, way

    measured = {
        "prefill": prefill_times(runner, model),
        "steps_of_the_way": way(runner, [1, max(options.batches)], 512),
        "profile": profile(runner, [1, max(options.batches)]),
    }
    for section, rows in measured.items():
        for row in rows:
            found[section].append(row)
            print(section, json.dumps(row), flush=True)
    return found


PARTS = {"lockstep": in_lockstep, "arrivals": at_random, "bursts": in_bursts, "kernels": of_kernels}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="use its weights instead of random ones of the true shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 4096])
    parser.add_argument("--frames", type=int, default=150, help="of each session")
    parser.add_argument("--requests", type=int, default=200, help="that arrive at random")
    parser.add_argument("--concurrency", type=int, default=64, help="of these")
    parser.add_argument("--prompt-rows", type=int, default=300, help="at most, of these")
    parser.add_argument("--prefill-chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--prefill-chunks-per-step", type=int, nargs="+", default=[1, 2, 4, 8], help="in a burst")
    parser.add_argument("--spreads-ms", type=int, nargs="+", default=[0, 50, 100], help="in which a burst arrives")
    parser.add_argument(
        "--prompt-leads-ms",
        type=int,
        nargs="+",
        default=[0],
        help="by which a prompt of a burst precedes its text",
    )
    parser.add_argument("--rounds", type=int, default=2, help="of a burst; --concurrency is its size")
    parser.add_argument("--burst-rows", type=int, default=75, help="of each prompt of a burst")
    parser.add_argument("--chunk-frames", type=int, nargs="+", default=[4, 8, 16, 25], help="in a burst")
    parser.add_argument("--commit", default=report.commit())
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance" / "talker.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
