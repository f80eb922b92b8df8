#!/usr/bin/env python3
"""How fast code2wav is, without Triton and without a checkpoint's weights.

    scripts/bench_code2wav.py                                        # true shape, random weights, one GPU: 2 minutes
    scripts/bench_code2wav.py --checkpoint DIR --device cpu --quick  # a checkpoint's engine, on CPU

On a GPU: calls by batch and chunk, beside them the scheme that recomputes 25 frames of context with every chunk (by the
same kernels) and transformers' own module; the distance from float32; single convolutions beside cuDNN's; a profile of
one step. Prints a table and writes it to docs/performance/code2wav.json (on a GPU, or where --out names a file).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shlex
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from triton_omni.bench import report
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.factory import load_code2wav
from triton_omni.code2wav.random_weights import random_code2wav
from triton_omni.code2wav.runner import Row
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import CodesChunk

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"
FRAME_S = 0.08
CONTEXT_FRAMES = 25
BATCHES, CHUNKS = (1, 8, 32, 64), (1, 4, 8, 25)


def median_ms(run: Callable[[], object], repeats: int = 7) -> float:
    """Host time of a call that waits for its own results."""
    times_ms = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        run()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(times_ms[1:])


def median_gpu_ms(launch: Callable[[], object], repeats: int = 7) -> float:
    times_ms = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms[1:])


def flops_per_frame(model: torch.nn.Module, shape: Code2WavShape) -> float:
    """Multiplications and additions of all matrix products and convolutions, attention's own left out."""
    total, rate = 0.0, 1
    levels = iter(shape.levels[1:])
    for module in model.modules():
        if isinstance(module, torch.nn.ConvTranspose1d):
            total += 2.0 * rate * module.weight.numel()
            rate = next(levels).rate
        elif isinstance(module, torch.nn.Conv1d | torch.nn.Linear):
            total += 2.0 * rate * module.weight.numel()
    return total


def bench_engine(config: ModelConfig, device: str, quick: bool) -> list[dict[str, Any]]:
    """Calls of a checkpoint's engine."""
    engine = load_code2wav(config, Code2WavConfig(device=device))
    groups, size = config.code2wav["num_quantizers"], config.code2wav["codebook_size"]
    rows = []
    for batch, frames in itertools.product((1, 4) if quick else BATCHES, (4, 25) if quick else CHUNKS):
        codes = np.random.default_rng(0).integers(0, size, (frames, groups), dtype=np.int32)
        names = [str(uuid.uuid4()) for _ in range(batch)]
        engine.decode([CodesChunk(name, codes, start=True) for name in names])
        chunks = [CodesChunk(name, codes) for name in names]
        ms = median_ms(lambda chunks=chunks: engine.decode(chunks), 3 if quick else 7)  # type: ignore[misc]
        engine.decode([CodesChunk(name, codes[:0], end=True) for name in names])
        rows.append({"batch": batch, "frames": frames, "ms_per_call": ms})
    engine.close()
    return rows


def bench_steps(packed: Any, flops: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Calls by batch and chunk, and the kernels of the smallest and the largest."""
    from triton_omni.code2wav.buckets import Bucket
    from triton_omni.code2wav.fused import FusedDecoder
    from triton_omni.code2wav.graphs import FusedRunner

    chunks = list(itertools.product(BATCHES, CHUNKS))
    shapes = [Bucket(b, f) for b, f in chunks] + [Bucket(b, CONTEXT_FRAMES + f) for b, f in chunks]
    began_s = time.monotonic()
    runner = FusedRunner(FusedDecoder(packed, max(BATCHES) + 1, shapes), cuda_graph=True)
    print(f"{len(shapes)} graphs in {time.monotonic() - began_s:.1f} s")
    random = np.random.default_rng(0)
    codes = random.integers(0, packed.shape.codebook_size, (max(BATCHES), 50, packed.shape.code_groups), dtype=np.int32)
    rows = []
    for batch, frames in chunks:
        given = [Row(slot, 100, codes[slot, :frames]) for slot in range(batch)]
        ms = median_ms(lambda given=given: runner.decode(given))  # type: ignore[misc]
        gpu_ms = median_gpu_ms(lambda: runner.launch(Bucket(batch, frames)))  # noqa: B023
        recompute_ms = median_gpu_ms(lambda: runner.launch(Bucket(batch, CONTEXT_FRAMES + frames)))  # noqa: B023
        rows.append(
            {
                "batch": batch,
                "frames": frames,
                "ms_per_call": ms,
                "gpu_ms": gpu_ms,
                "audio_s_per_s": batch * frames * FRAME_S / ms * 1e3,
                "gflop_per_s": batch * frames * flops / gpu_ms / 1e6,
                "recompute_gpu_ms": recompute_ms,
                "speedup_vs_recompute": recompute_ms / gpu_ms,
            }
        )
    profiles = {f"{b} x {f}": profile(lambda: runner.launch(Bucket(b, f))) for b, f in ((1, 4), (64, 25))}  # noqa: B023
    return rows, profiles


def bench_gpu(shape: Code2WavShape) -> dict[str, Any]:
    from triton_omni.code2wav.buckets import buckets
    from triton_omni.code2wav.fidelity import signal_to_noise_db
    from triton_omni.code2wav.memory import MemoryPlan
    from triton_omni.code2wav.packing import PackedCode2Wav

    device = torch.device("cuda")
    model = random_code2wav(shape, device, slots=max(BATCHES))
    flops = flops_per_frame(model, shape)
    snr_db = {}
    for dtype in (torch.bfloat16, torch.float16):
        packed = PackedCode2Wav(model, dtype, device)
        snr_db[str(dtype).removeprefix("torch.")] = signal_to_noise_db(model, packed)
    print(f"{flops / 1e9:.2f} GFLOP per frame; SNR against float32, dB: {snr_db}")

    rows, profiles = bench_steps(packed, flops)
    plan = MemoryPlan.of(shape, torch.float16, 64, buckets(64, 1600))
    return {
        "gflop_per_frame": flops / 1e9,
        "snr_db": snr_db,
        "memory": str(plan),
        "memory_mib": {"weights": plan.weights / 2**20, "slot": plan.slot / 2**20, "work": plan.work / 2**20},
        "rows": rows,
        "profile": profiles,
        "convolutions": bench_convolutions(model, packed),
        "plain_pytorch": bench_pytorch(model, shape),
        "transformers": bench_transformers(shape),
    }


def profile(launch: Callable[[], object]) -> list[dict[str, Any]]:
    """Kernels of one step, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        launch()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.device_time / 1e3)
    total = [{"kernel": name, "launches": len(ms), "ms": sum(ms)} for name, ms in kernels.items()]
    return sorted(total, key=lambda kernel: -float(kernel["ms"]))


def bench_convolutions(model: Any, packed: Any) -> list[dict[str, Any]]:
    """The dilated convolutions of each block at batch 64 x 25 frames: this project's kernel, SnakeBeta included, and
    cuDNN's through PyTorch in float16 without it, channels first and channels last."""
    from triton_omni.code2wav import tiles
    from triton_omni.code2wav.kernels import conv

    rows = []
    torch.backends.cudnn.benchmark = True
    for block, level in zip(packed.blocks, model.shape.levels[-len(packed.blocks) :], strict=True):
        unit, batch, columns = block.units[1], 64, 25 * level.rate
        layer = unit.conv1
        x = torch.randn(batch, layer.head + columns, layer.channels_in, device="cuda", dtype=torch.float16)
        out = conv.Columns(torch.empty_like(x))
        tile = tiles.choose(layer, batch * columns)
        ours_ms = median_gpu_ms(lambda: conv.conv(x, layer, batch, columns, tile, act=out, snake=unit.act2))  # noqa: B023
        weight = torch.randn(layer.channels_out, layer.channels_in, layer.taps, device="cuda", dtype=torch.float16)
        first, last = x.transpose(1, 2).contiguous(), x.transpose(1, 2)[:, :, None]
        first_ms = median_gpu_ms(lambda: F.conv1d(first, weight, dilation=layer.dilation), 3)  # noqa: B023
        weight = weight[:, :, None].to(memory_format=torch.channels_last)
        last_ms = median_gpu_ms(lambda: F.conv2d(last, weight, dilation=(1, layer.dilation)), 3)  # noqa: B023
        rows.append(
            {
                "channels": layer.channels_in,
                "columns": batch * columns,
                "ms": ours_ms,
                "tflop_per_s": 2 * batch * columns * layer.weight.numel() / ours_ms / 1e9,
                "cudnn_channels_first_ms": first_ms,
                "cudnn_channels_last_ms": last_ms,
            }
        )
    torch.backends.cudnn.benchmark = False
    return rows


def bench_pytorch(model: Any, shape: Code2WavShape) -> list[dict[str, Any]]:
    """The streaming reference itself, kernel by kernel from PyTorch: float32 (TF32 in cuDNN) and float16."""
    rows = []
    for dtype in (torch.float32, torch.float16):
        model.to(dtype)
        for batch, frames in ((1, 4), (64, 25)):
            codes = torch.randint(shape.codebook_size, (batch, frames, shape.code_groups), device="cuda")
            numbers = torch.arange(batch, device="cuda")
            step = (codes, torch.full_like(numbers, frames), torch.full_like(numbers, 100), numbers)
            with torch.inference_mode():
                ms = median_gpu_ms(lambda: model(*step), 3)  # noqa: B023
            rows.append({"dtype": str(dtype), "batch": batch, "frames": frames, "gpu_ms": ms})
    return rows


def bench_transformers(shape: Code2WavShape) -> list[dict[str, Any]]:
    """transformers' module on chunks with 25 frames of context, eager."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    config = Qwen3OmniMoeCode2WavConfig(**json.loads(SHAPE.read_text())["code2wav_config"])
    rows = []
    for dtype in (torch.float32, torch.float16):
        torch.cuda.empty_cache()
        with torch.device("cuda"):
            module = Qwen3OmniMoeCode2Wav._from_config(config).to(dtype).eval()
        for batch, frames in ((1, 4), (8, 25), (64, 25)):
            codes = torch.randint(
                shape.codebook_size, (batch, shape.code_groups, CONTEXT_FRAMES + frames), device="cuda"
            )
            with torch.inference_mode():
                ms = median_gpu_ms(lambda: module(codes), 3)  # noqa: B023
            row = {"dtype": str(dtype), "batch": batch, "frames": frames, "gpu_ms": ms}
            rows.append(row | {"audio_s_per_s": batch * frames * FRAME_S / ms * 1e3})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="measure its engine instead of the true shape's decoder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (with --checkpoint)")
    parser.add_argument("--quick", action="store_true", help="small batches, few repeats (with --checkpoint)")
    parser.add_argument("--commit", default=report.commit(), help="what to write down as measured")
    parser.add_argument("--out", type=Path, help="JSON to write; default docs/performance/code2wav.json on a GPU")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    out: Path | None = options.out
    if options.checkpoint:
        measured: dict[str, Any] = {
            "rows": bench_engine(ModelConfig.load(options.checkpoint), options.device, options.quick)
        }
    elif torch.cuda.is_available():
        measured = bench_gpu(Code2WavShape.from_config(json.loads(SHAPE.read_text())["code2wav_config"]))
        out = out or ROOT / "docs" / "performance" / "code2wav.json"
    else:
        parser.error("the true shape needs a GPU; name a --checkpoint to measure on CPU")
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    where = {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "commit": options.commit,
        "command": shlex.join(["scripts/bench_code2wav.py", *sys.argv[1:]]),
    }
    for row in measured["rows"]:
        row.setdefault("audio_s_per_s", row["batch"] * row["frames"] * FRAME_S / row["ms_per_call"] * 1e3)
        row.update(where)
        print(
            "  ".join(
                f"{k} {v:9.3f}" if isinstance(v, float) else f"{k} {v:4}" for k, v in row.items() if k not in where
            )
        )
    print(json.dumps({key: value for key, value in measured.items() if key != "rows"}, indent=1))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(where | measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
