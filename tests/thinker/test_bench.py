"""What the benchmark of the thinker computes and prepares."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.measure.figures import CpuTime, Processes, Run, Timing, Workload, process_s
from triton_omni.thinker.measure.systems import Setting, bare_engine_args
from triton_omni.thinker.mrope import MRope

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_thinker", ROOT / "scripts" / "bench_thinker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    spec.loader.exec_module(module)
    return module


def test_a_row() -> None:
    timings = [Timing(first_s=0.1, total_s=1.1, tokens=11), Timing(first_s=0.3, total_s=0.8, tokens=11)]
    cpu = CpuTime(process_s=0.0011, children_s=0.02)
    assert Run(concurrency=2, wall_s=2.0, cpu=cpu, timings=timings).row("bare") == {
        "system": "bare",
        "concurrency": 2,
        "requests": 2,
        "tokens_per_request": 11.0,
        "tokens_per_s": 11.0,
        "ttft_ms": 200.0,
        "tpot_ms": 75.0,
        "process_us_per_token": 50.0,
        "process_ms_per_request": 0.55,
        "engine_ms_per_request": 10.0,
    }


def test_the_time_of_a_process_and_of_those_below_it_grows() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        processes = Processes.of(os.getpid())
        before = processes.cpu_time()
        while (spent := processes.cpu_time().since(before)).process_s == 0 or spent.children_s == 0:
            sum(range(10_000))
        child.kill()
    assert process_s(child.pid) == 0


def test_answers_differ_in_length_and_not_between_systems() -> None:
    workload = Workload.of("40-200", rounds=4)
    tokens = [workload.tokens(number) for number in range(workload.requests(64))]
    assert len(tokens) == 256
    assert (min(tokens), max(tokens)) == (40, 200)
    assert 115 < sum(tokens) / len(tokens) < 125
    assert workload.requests(1) == 8
    assert {Workload.of("128", 1).tokens(number) for number in range(9)} == {128}


@pytest.mark.parametrize("tokens", ["", "some", "0", "9-3", "-5"])
def test_tokens_that_are_no_range_are_refused(tokens: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Workload.of(tokens, 1)
    assert raised.value.field == "tokens"


ROW = {"system": "bare", "concurrency": 1, "tokens_per_s": 8.0}


@pytest.mark.parametrize(
    ("then", "until_s", "rows"),
    [("sys.exit(1)", 600.0, [ROW | {"gpu": "none", "ratio": 1.0}]), ("threading.Event().wait()", 0.0, None)],
    ids=["fails", "is late"],
)
def test_what_was_told_is_kept_of_a_system_that(
    then: str, until_s: float, rows: Any, bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = tmp_path / "system.py", tmp_path / "rows.json"
    told = f"print(json.dumps({ROW}), flush=True)" if rows else ""
    script.write_text(f"import json, sys, threading\n{told}\n{then}\n")
    monkeypatch.setattr(bench, "__file__", str(script))
    systems = bench.Systems({"gpu": "none"}, out)
    systems.run("bare", None, time.monotonic() + until_s)
    assert systems.failed == ["bare"]
    assert (json.loads(out.read_text()) if out.exists() else None) == rows


def test_a_shape_takes_all_but_tensors_and_config_from_the_checkpoint(
    bench: ModuleType, checkpoint: Path, tmp_path: Path
) -> None:
    config = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"
    shaped = bench.checkpoint_of_shape(checkpoint, config, tmp_path)
    assert json.loads((shaped / "config.json").read_text()) == json.loads(config.read_text())
    assert not list(shaped.glob("*safetensors*"))
    assert (shaped / "vocab.json").read_bytes() == (checkpoint / "vocab.json").read_bytes()
    assert ModelConfig.load(shaped).thinker["text_config"]["num_hidden_layers"] == 48


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_both_systems_take_the_true_shape(bench: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    """As far as vLLM's own configuration, which needs no weights."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.usage.usage_lib import UsageContext

    from triton_omni.thinker.vllm_args import engine_args
    from triton_omni.thinker.vllm_plugin import register

    register()
    shaped = bench.checkpoint_of_shape(checkpoint, ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json", tmp_path)
    setting = Setting(shaped, True, "auto", 64, "{}", [1], Workload.of("40", 1))
    model = ModelConfig.load(shaped)
    assert MRope.of(model.thinker).spatial_merge_size == 2
    for args in (engine_args(model, ThinkerConfig(weights="random"), "socket"), bare_engine_args(setting)):
        assert args.create_engine_config(UsageContext.ENGINE_CONTEXT).model_config.max_model_len == 65536
