"""scripts/bench_plumbing.py runs, its rows parse, and a request stays within its budget of Triton messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]
MESSAGE_BUDGET = 250
PIECES = 40 + 8  # text tokens and chunks of the default plan for 149 frames
TEXT_MESSAGES = 1 + 1 + 1 + 1  # request, thinker's request, its first response, start event: whatever is joined later


def test_a_small_run(tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "rows.json"
    few = ["--concurrency", "2", "--requests", "4", "--waves", "1", "--rounds", "1", "--hop-requests", "3"]
    command = [sys.executable, ROOT / "scripts" / "bench_plumbing.py", "--plans", "4,8,16,25", "--bls-instances", "1"]
    log = tmp_path / "tritonserver.log"
    done = subprocess.run(
        [*command, *few, "--checkpoint", checkpoint, "--log", log, "--out", out], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stderr}\n{log.read_text(errors='replace')[-2000:]}"
    result = json.loads(out.read_text())
    assert set(result) == {"command", "commit", "machine", "pace_ms", "rows"}
    assert str(tmp_path) not in out.read_text(), "no paths of this machine"
    omni, bare = result["rows"]
    assert (omni["system"], bare["system"]) == ("omni", "bare")
    assert TEXT_MESSAGES < omni["messages_per_request"] <= MESSAGE_BUDGET
    for row in (omni, bare):
        assert row["requests"] == 4 and row["chunk_frames"] == [4, 8, 16, 25]
        assert row["chunks_per_s"] == pytest.approx(row["req_s"] * PIECES, abs=0.005 * PIECES + 0.05)  # as rounded
        assert 0 < row["responses_per_s"] <= row["chunks_per_s"]
        assert 0 < row["ttft_ms"] <= row["e2e_ms"] <= row["e2e_p99_ms"] and 0 < row["ttfp_ms"] <= row["e2e_ms"]
        assert row["hop_ms"] > 0 and 0 <= row["stalled_requests"] <= 4
        assert all(ms >= 0 for ms in row["cpu_ms_per_request"].values())
    assert omni["share_of_bare"] == pytest.approx(omni["chunks_per_s"] / bare["chunks_per_s"], abs=0.001)
    assert set(omni["cpu_ms_per_request"]) == {"omni_bls", "thinker", "talker", "code2wav", "tritonserver", "client"}
