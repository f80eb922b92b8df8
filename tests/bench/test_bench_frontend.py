"""The script that compares the frontend with omni_bls itself runs, and writes what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.triton, pytest.mark.slow]


def test_both_ways_in_turns(checkpoint: Path, tmp_path: Path):
    out = tmp_path / "frontend.json"
    options = ["--rounds", "1", "--concurrency", "2", "--requests", "4", "--token-ms", "1", "--frame-ms", "0.5"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_frontend.py"), "--checkpoint", str(checkpoint), *options]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    through, direct = told["runs"]
    assert (through["api"], direct["api"]) == ("openai", "grpc")
    assert [(run["completed"], run["failed"]) for run in told["runs"]] == [(4, 0)] * 2
    assert through["triton_cpu_ms"] > 0 <= direct["frontend_cpu_ms"]
    ratio = through["req_s"] / direct["req_s"]
    assert told["frontend_over_grpc"]["req_s"] == pytest.approx(ratio, abs=2e-3 * ratio + 1e-3)
