"""The sweep on this machine, with null engines: rows are measured, kept, resumed and written up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from triton_omni.bench import command_line
from triton_omni.sweep import budget as budgets
from triton_omni.sweep import outputs
from triton_omni.sweep.main import main

FIELDS = (
    *("system", "config", "concurrency", "completed", "failed", "req_s", "ttfp_ms", "ttfp_p99_ms", "rtf", "e2e_ms"),
    *("audio_s_per_s", "underruns", "gpus", "commit", "command", "requests", "weights"),
)
NULL = [f"--set={stage}.engine=null" for stage in ("thinker", "talker", "code2wav")]
TIMEOUT_S = 600


def sweep(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "sweep.sh"), "--results", str(tmp_path / "rows.jsonl"), *arguments]
    environment = os.environ | {"OMNI_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command += ["--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_rows_at_two_levels(checkpoint: Path, tmp_path: Path) -> None:
    small = ["--checkpoint", str(checkpoint), "--profile", "cpu-demo", "--frontend-workers", "1", *NULL]
    small += ["--text-tokens", "4", "--audio-frames", "8"]
    done = sweep(tmp_path, "--rows", "async_output,replicas", "--levels", "1,2", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = rows(tmp_path)
    points = [("async_output", 1), ("async_output", 2), ("replicas", 1), ("replicas", 2)]
    assert [(row["config"], row["concurrency"]) for row in kept] == points
    for row in kept:
        assert row.keys() >= {*FIELDS}
        assert row["failed"] == 0 and row["completed"] == row["requests"] == 10 * row["concurrency"]
        assert 0 < row["ttfp_ms"] <= row["ttfp_p99_ms"] and row["req_s"] > 0 and row["text_tokens"] == 4
        assert row["audio_s"] == pytest.approx((8 * 1920 - 555) / 24_000, abs=1e-3)
    loads = re.findall(r"loading (.+)", done.stderr)
    assert loads == ["thinker, talker, code2wav, omni_bls", "talker, code2wav"]  # the thinker and omni_bls are kept
    written = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert written == kept
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert page.count("| + replicas |") == 2 and "## CPU" in page and f"weights: {checkpoint.name}" in page
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")

    again = sweep(tmp_path, "--rows", "async_output,replicas", "--levels", "1,2", "--resume", *small)
    assert again.returncode == 0 and rows(tmp_path) == kept, again.stderr
    assert "loading" not in again.stderr  # nothing to do: no server was started


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_one_long_request(checkpoint: Path, tmp_path: Path) -> None:
    """Through omni_bls itself, without the frontend."""
    small = ["--checkpoint", str(checkpoint), "--profile", "cpu-demo", "--api", "grpc", *NULL]
    done = sweep(
        tmp_path, "--long-form", "--text-tokens", "40", "--audio-frames", "100", "--prompt-tokens", "500", *small
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = rows(tmp_path)
    assert row["config"] == "long_form" and row["completed"] == 2 and row["failed"] == 0
    assert row["audio_s"] == pytest.approx((100 * 1920 - 555) / 24_000, abs=1e-3) and len(row["rtf_by_quarter"]) == 4
    assert 0 < row["ttfp_ms"] < row["e2e_ms"]
    assert "in each quarter" in (tmp_path / "out" / "sweep.md").read_text()


def test_wrong_options_are_told_at_once(tmp_path: Path) -> None:
    for arguments, told in (
        (["--rows", "cuda_graphs"], "did you mean 'cuda_graph'"),
        (["--rows", "vllm_omni"], "--vllm-omni-url"),
        (["--rows", "batch", "--profile", "cpu-dmo"], "did you mean 'cpu-demo'"),
        (["--rows", "batch", "--profile", "cpu-demo", "--set", "talker.max_session=3"], "max_sessions"),
    ):
        done = sweep(tmp_path, *arguments)
        assert done.returncode == 1 and told in done.stderr, done.stderr
    done = sweep(tmp_path, "--levels", "0")
    assert done.returncode == 2 and "numbers above 0" in done.stderr


def test_the_latest_row_of_a_point_counts() -> None:
    given = [point("replicas", 1, 1.0), point("no_batch", 1, 2.0), point("replicas", 1, 3.0)]
    assert outputs.latest(given) == [given[1], given[2]]


def point(config: str, concurrency: int, req_s: float) -> dict[str, Any]:
    figures = dict.fromkeys(("audio_s_per_s", "ttft_ms", "ttfp_ms", "ttfp_p99_ms", "rtf", "e2e_ms"), 1.0)
    about = {"system": "triton-omni", "gpus": "2 x GPU", "commit": "abc", "command": "scripts/sweep.sh", "weights": "w"}
    counts = {"completed": 4, "failed": 0, "underruns": 0, "prompt_tokens": 60.0, "text_tokens": 40.0, "audio_s": 11.9}
    return {"config": config, "concurrency": concurrency, "req_s": req_s} | figures | about | counts


def test_a_page_from_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, others = tmp_path / "ours.jsonl", tmp_path / "others.jsonl"
    ours.write_text(json.dumps(point("replicas", 16, 40.0)) + "\n" + json.dumps(point("batch", 16, 9.0)) + "\n")
    others.write_text(json.dumps(point("vllm_omni", 16, 4.5)) + "\n")
    arguments = ["--report", "--out", str(tmp_path / "out"), "--results", str(ours), str(others)]
    assert main(arguments) == 0
    page = (tmp_path / "out" / "sweep.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and "GPU" not in line][2:]
    assert [line.split(" | ")[0] for line in lines] == ["| vLLM-Omni", "| + batch", "| + replicas"]
    assert "| + replicas | 16 | 4 | 0 | 40.00 |" in page and "## 2 x GPU" in page
    ours.write_text("{}\n")
    assert main(arguments) == 1 and "no row of this benchmark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget", "wave_s", "code", "requests"),
    [
        ([], 2.0, 0, [1, 10, 4, 40]),  # a wave of warm-up and ten, at each level
        (
            ["--budget-s", "60"],
            10.0,
            0,
            [1, 3, 4, 24],
        ),  # 30 s each; none has passed when the second has all that is left
        (["--budget-s", "60"], 40.0, 3, [1]),  # no time for two waves, and none for more of the next level
    ],
)
def test_another_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget: list[str], wave_s: float, code: int, requests: list[int]
) -> None:
    """By the same client; ours is not started."""
    asked: list[int] = []

    def measure(options: Any, command: str, tell: Any) -> list[dict[str, Any]]:
        assert (options.url, options.api, options.model) == ("http://there", "vllm-omni", "qwen3-omni")
        asked.extend(options.requests)
        return [point(options.config, options.concurrency[0], 4.5) | {"wall_s": wave_s, "errors": {}}]

    monkeypatch.setattr(command_line, "measure", measure)
    monkeypatch.setattr(budgets, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    files = ["--results", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["--rows", "vllm_omni", "--levels", "1,4", "--vllm-omni-url", "http://there", *budget, *files]) == code
    assert asked == requests
    if code == 0:
        assert [row["requests"] for row in rows(tmp_path)] == requests[1::2]


def test_a_server_that_refuses_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = point("vllm_omni", 1, 0.0) | {"completed": 0, "wall_s": 0.1, "errors": {"HTTP 500": 1}}
    monkeypatch.setattr(command_line, "measure", lambda *_: [refused])
    files = ["--results", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["--rows", "vllm_omni", "--levels", "1", "--vllm-omni-url", "http://there", *files]) == 1
    assert "HTTP 500" in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()
