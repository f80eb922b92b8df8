"""The whole client against real servers, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.openai_frontend.conftest import MODEL, null_frontend  # noqa: F401
from triton_omni.bench import plots, report
from triton_omni.bench.command_line import main
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

FRAMES = 20
AUDIO_S = (FRAMES * 1920 - 555) / 24_000
WORK = ["--text-tokens", "12", "--audio-frames", str(FRAMES), "--warmups", "1", "--gpus", "none"]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.triton
class TestServers:
    def check(self, row: dict, requests: int) -> None:
        assert (row["completed"], row["failed"], row["errors"]) == (requests, 0, {})
        assert row["audio_s"] == pytest.approx(AUDIO_S, abs=1e-4)
        assert row["audio_s_per_s"] == pytest.approx(requests * AUDIO_S / row["wall_s"], rel=1e-3)
        assert (row["text_tokens"], row["prompt_tokens"]) == (12, 32)  # what the null thinker says of any prompt
        assert 0 < row["ttft_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["ttfp_ms"] <= row["e2e_ms"]
        assert row["rtf"] > 0
        assert row["commit"] is not None

    def test_levels_over_http(self, null_frontend: FrontendProcess, tmp_path: Path, capsys):  # noqa: F811
        out, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
        load = ["--concurrency", "1,4", "--requests", "2,8", "--processes", "2", "--config", "null"]
        arguments = ["run", "--url", null_frontend.url, "--model", MODEL, *WORK, *load]
        assert main([*arguments, "--out", str(out), "--plot", str(picture)]) == 0
        first, second = rows_of(out)
        self.check(first, 2)
        self.check(second, 8)
        assert (first["concurrency"], second["concurrency"]) == (1, 4)
        assert second["command"].startswith("scripts/bench.py run --url")
        assert picture.read_bytes().startswith(b"\x89PNG")
        told = capsys.readouterr().out
        assert "triton-omni null" in told
        assert "audio_rtf" in told  # the definitions

    def test_omni_bls_at_a_rate(self, null_server: TritonServer, tmp_path: Path):
        out = tmp_path / "rows.jsonl"
        load = ["--request-rate", "20", "--requests", "6"]
        assert main(["run", "--api", "grpc", "--url", null_server.grpc_target, *WORK, *load, "--out", str(out)]) == 0
        (row,) = rows_of(out)
        self.check(row, 6)
        assert (row["concurrency"], row["request_rate"], row["config"]) == (0, 20.0, "grpc")

    def test_vllm_omni_s_dialect(self, null_frontend: FrontendProcess, tmp_path: Path):  # noqa: F811
        out = tmp_path / "rows.jsonl"
        extra = {"audio": {"dialect": "vllm-omni"}, "max_tokens": 12, "talker": {"max_frames": FRAMES}}
        arguments = ["run", "--api", "vllm-omni", "--natural", "--extra-body", json.dumps(extra), "--warmups", "0"]
        load = [
            "--url",
            null_frontend.url,
            "--model",
            MODEL,
            "--concurrency",
            "2",
            "--requests",
            "2",
            "--out",
            str(out),
        ]
        assert main([*arguments, *load]) == 0
        self.check(rows_of(out)[0], 2)

    def test_failures_are_counted_and_told(self, null_frontend: FrontendProcess, tmp_path: Path, capsys):  # noqa: F811
        out = tmp_path / "rows.jsonl"
        load = ["--concurrency", "2", "--requests", "4", "--warmups", "0", "--out", str(out)]
        assert main(["run", "--url", null_frontend.url, "--model", "other", *load]) == 2
        (row,) = rows_of(out)
        assert (row["completed"], row["failed"], row["req_s"]) == (0, 4, 0.0)
        assert "c=2: 4 x HTTP 404" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--url", "http://127.0.0.1:1"], "--model: is missing"),
        (["run", "--url", "x", "--model", "m", "--requests", "1,2"], "--requests: must be one number or 4"),
        (["run", "--url", "x", "--model", "m", "--text-tokens", "0"], "--text-tokens: must be at least 1"),
        (["report", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_told(arguments, told, capsys):
    assert main(arguments) == 1
    assert told in capsys.readouterr().err


def row(system: str, concurrency: int, **figures: float) -> dict:
    return {"system": system, "config": "", "concurrency": concurrency, "completed": 1, "failed": 0, **figures}


def test_lines_of_a_plot():
    rows = [row("ours", 16, rtf=0.2), row("ours", 1, rtf=0.1), row("theirs", 1, rtf=0.3), row("ours", 1, rtf=0.15)]
    rows.append(row("theirs", 16, rtf=None))
    assert plots.lines(rows, "rtf") == {"ours": [(1, 0.15), (16, 0.2)], "theirs": [(1, 0.3)]}


def test_kept_rows_are_read_back_and_others_named(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    report.append(file, row("ours", 1, rtf=0.123456789))
    report.append(file, row("ours", 2))
    assert [r.get("rtf") for r in report.read([file])] == [0.12346, None]
    file.write_text('{"system": "x"}\n')
    with pytest.raises(report.ConfigError, match=r"rows.jsonl:1 is no row .* completed, config, failed"):
        report.read([file])
