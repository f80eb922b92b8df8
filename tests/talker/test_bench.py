"""The measuring scripts run, also on CPU with a small talker, and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

ROW = {"batch", "context", "ms_per_frame", "p99_ms", "idle_gap_us", "frames_per_s", "memory_gib", "gpu", "commit"}


def run(script: str, out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / script), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_bench_talker(checkpoint: Path, tmp_path: Path) -> None:
    sizes = (
        "--batches 1 2 --contexts 48 64 --frames 6 --requests 3 --concurrency 2 --prefill-chunks 16 --prompt-rows 40 "
        "--spreads-ms 0 --prompt-leads-ms 0 300 --prefill-chunks-per-step 1 3 --burst-rows 40"
    )
    small = ["--checkpoint", str(checkpoint), "--device", "cpu", *sizes.split()]
    out = tmp_path / "talker.json"
    out.write_text(json.dumps({"profile": ["as it was"], "bursts": []}))
    result = run("bench_talker.py", out, "--parts", "lockstep", "arrivals", "bursts", *small)
    assert result["profile"] == ["as it was"]
    assert [(row["batch"], row["context"]) for row in result["rows"]] == [(1, 48), (1, 64), (2, 48), (2, 64)]
    for row in result["rows"]:
        assert row.keys() >= {*ROW, "command"} and 0 < row["ms_per_frame"] <= row["p99_ms"]
    (arrived,) = result["arrivals"]
    assert arrived["requests"] == 3 and arrived["mean_rtf"] > 0
    bursts = [(row["prompt_lead_ms"], row["prefill_chunks_per_step"]) for row in result["bursts"]]
    assert bursts == [(0, 1), (0, 3), (300, 1), (300, 3)]
    for row in result["bursts"]:
        assert row["rounds"] == 2 and 0 < row["mean_first_chunk_ms"] <= row["p99_first_chunk_ms"]
        assert row["max_frame_wait_ms"] > 0 and row.keys() >= {"stalled_sessions", "command"}


def test_talker_numerics(checkpoint: Path, tmp_path: Path) -> None:
    result = run("talker_numerics.py", tmp_path / "n.json", "--checkpoint", str(checkpoint), "--frames", "40")
    assert [(row["from"], row["to"]) for row in result["rows"]] == [(0, 10), (10, 20), (20, 30), (30, 40), (0, 40)]
    assert all(row["cosine_layer0"] > 0.98 for row in result["rows"])
