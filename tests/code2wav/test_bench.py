"""The measuring script runs, also on CPU with a small checkpoint, and writes what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_bench_code2wav(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "code2wav.json"
    options = ["--checkpoint", str(checkpoint), "--device", "cpu", "--quick", "--out", str(out)]
    command = [sys.executable, str(ROOT / "scripts" / "bench_code2wav.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [(row["batch"], row["frames"]) for row in result["rows"]] == [(1, 4), (1, 25), (4, 4), (4, 25)]
    for row in result["rows"]:
        assert row.keys() >= {"ms_per_call", "audio_s_per_s", "gpu", "commit", "command"}
        seconds = row["batch"] * row["frames"] * 0.08
        assert abs(row["audio_s_per_s"] * row["ms_per_call"] / 1e3 - seconds) < 1e-6 * seconds
