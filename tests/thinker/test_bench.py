"""What the benchmark of the thinker computes and prepares."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from triton_omni.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_thinker", ROOT / "scripts" / "bench_thinker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    spec.loader.exec_module(module)
    return module


def test_a_row(bench: ModuleType) -> None:
    timings = [bench.Timing(first_s=0.1, total_s=1.1, tokens=11), bench.Timing(first_s=0.3, total_s=0.8, tokens=11)]
    assert bench.row("bare", bench.Run(concurrency=2, wall_s=2.0, process_s=0.0011, timings=timings)) == {
        "system": "bare",
        "concurrency": 2,
        "tokens_per_s": 11.0,
        "ttft_ms": 200.0,
        "tpot_ms": 75.0,
        "process_us_per_token": 50.0,
    }


def test_the_time_of_a_process_grows(bench: ModuleType) -> None:
    before_s = bench.process_s(os.getpid())
    while bench.process_s(os.getpid()) == before_s:
        sum(range(10_000))


def test_a_shape_takes_all_but_tensors_and_config_from_the_checkpoint(
    bench: ModuleType, checkpoint: Path, tmp_path: Path
) -> None:
    config = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"
    shaped = bench.checkpoint_of_shape(checkpoint, config, tmp_path)
    assert json.loads((shaped / "config.json").read_text()) == json.loads(config.read_text())
    assert not list(shaped.glob("*safetensors*"))
    assert (shaped / "vocab.json").read_bytes() == (checkpoint / "vocab.json").read_bytes()
    assert ModelConfig.load(shaped).thinker["text_config"]["num_hidden_layers"] == 48
