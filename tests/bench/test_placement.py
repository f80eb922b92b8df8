"""What talker and code2wav cost each other: through the real processes on CPU, the arithmetic, and the MPS daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from tests.conftest import ROOT
from triton_omni.bench.placement import cases, mps
from triton_omni.bench.placement.cases import figures, loads, only_gpu
from triton_omni.bench.placement.loads import Limit, Load, Settings, Times
from triton_omni.bench.placement.processes import Worker, new_pace
from triton_omni.errors import StageError
from triton_omni.model_config import ModelConfig


@pytest.mark.timeout(900)
def test_bench_placement(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "placement.json"
    sizes = "--batches 4 1 --context 48 --frames 12 --chunk-frames 4 --case-s 120 --limit-s 800 --commit abc"
    options = ["--checkpoint", str(checkpoint), "--device", "cpu", *sizes.split(), "--out", str(out)]
    command = [sys.executable, str(ROOT / "scripts" / "bench_placement.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["left_out"].keys() == {"two_gpus", "mps"}
    rows = result["rows"]
    together = [
        (f"{pace}", process, batch, beside)
        for pace, *batches in (("paced", 4, 4), ("spread", 4, 1), ("unthrottled", 4, 4))
        for process, batch, beside in (("talker", *batches), ("code2wav", *reversed(batches)))
    ]
    alone = [(None, process, batch, None) for batch in (4, 1) for process in ("talker", "code2wav")]
    found = [(row["pace"], row["process"], row["batch"], row["beside"]) for row in rows]
    assert found[:10] == alone + together and len(found) == 14
    assert all(row["case"] == ("alone" if row["pace"] is None else "together") for row in rows)
    for row in rows:
        assert (row["gpu"], row["commit"]) == ("none", "abc") and "--chunk-frames 4" in row["command"]
    talker, code2wav = rows[2:4]
    assert (talker["steps"], code2wav["steps"]) == (10, 40)  # of 12 frames one comes with the prompt
    for row in (talker, code2wav):
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["audio_s_per_s"] == pytest.approx(row["steps_per_s"] * row["frames"] * 0.08, rel=1e-3)


def test_what_counts_lies_where_all_are_at_work() -> None:
    talker = Times(0.0, 10.0, [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (8.0, 9.0)])
    code2wav = Times(0.5, 8.5, [(0.5, 1.0), (8.0, 9.0)])
    assert talker.within([talker, code2wav]) == [(1.0, 2.0), (2.0, 4.0)]
    assert code2wav.within([talker, code2wav]) == [(0.5, 1.0)]
    assert talker.within([talker]) == talker.spans


def test_figures_tell_the_rate_of_beginnings() -> None:
    assert figures([(0.0, 0.1), (1.0, 1.3), (2.0, 2.2)], audio_s=4.0) == {
        "steps": 3,
        "p50_ms": pytest.approx(200.0),
        "p99_ms": pytest.approx(298.0),
        "steps_per_s": 1.0,
        "audio_s_per_s": 4.0,
    }
    assert set(figures([], audio_s=4.0).values()) == {0, None}


def test_a_quarter_of_the_sessions_is_taken_where_such_calls_have_a_graph() -> None:
    assert [(load.sessions, load.rows, load.pace) for load in loads((64, 16, 8), 3.0)] == [
        (64, 64, "paced"),
        (64, 16, "spread"),
        (64, 64, "unthrottled"),
        (16, 16, "paced"),
        (16, 16, "unthrottled"),
        (8, 8, "paced"),
        (8, 8, "unthrottled"),
    ]


def test_calls_are_due_as_often_as_the_talker_says_and_until_the_end() -> None:
    pace = new_pace()
    calls = pace.calls(paced=True)
    for number in range(3):
        pace.due.release()
        assert next(calls) == number
    pace.stop()
    assert list(calls) == []
    pace.reset()
    assert not pace.due.acquire(block=False) and not pace.stopped.is_set()


@pytest.mark.parametrize(("visible", "second"), [("", "1"), ("3,5", "5")])
def test_a_process_sees_one_gpu_of_those_that_this_one_sees(
    visible: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert only_gpu(1) == {"CUDA_VISIBLE_DEVICES": second}


def test_an_engine_that_cannot_be_built_says_why(checkpoint: Path) -> None:
    settings = Settings(ModelConfig.load(checkpoint), "cpu", "checkpoint", (0,), 48, 24, 4)
    worker = Worker("talker", settings, new_pace(), {})
    try:
        with pytest.raises(StageError, match="must be at least 1"):
            worker.built(Limit.after(120))
    finally:
        worker.close(wait_s=0)


def test_a_process_that_is_not_ready_in_time_is_named(checkpoint: Path) -> None:
    settings = Settings(ModelConfig.load(checkpoint), "cpu", "checkpoint", (1,), 48, 24, 4)
    worker = Worker("code2wav", settings, new_pace(), {})
    try:
        with pytest.raises(TimeoutError, match="code2wav"):
            worker.built(Limit.after(0))
    finally:
        worker.close(wait_s=0)


class Measured:
    """A Bench that needs no engines; under MPS, which it knows by its environment, it fails with ``failure``."""

    failure: Exception | None = None

    def __init__(self, settings: Settings, limit: Limit, *, apart: bool = False, environment: Any = None) -> None:
        self.under_mps = environment is not None

    def __enter__(self) -> Self:
        if self.under_mps and self.failure is not None:
            raise self.failure
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def measure(self, case: str, load: Load, *names: str) -> list[dict[str, Any]]:
        return [{"case": case, "process": name} for name in names]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (None, {}),
        (StageError("talker", "no CUDA"), {"mps": "stage_failed [talker]: no CUDA"}),
        (TimeoutError("3 s are left"), {"rest of mps, and all behind it": "3 s are left"}),
    ],
)
def test_mps_may_fail_without_loss_of_the_other_cases(
    failure: Exception | None,
    said: dict[str, str],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = install(tmp_path, monkeypatch, "echo 4711")
    monkeypatch.setattr(Measured, "failure", failure)
    monkeypatch.setattr(cases, "Bench", Measured)
    settings = Settings(ModelConfig.load(checkpoint), "cpu", "checkpoint", (4,), 48, 12, 4)
    left_out: dict[str, str] = {}
    limit = Limit.after(60)
    rows = list(cases.measure_all(settings, limit, 1.0, apart=True, under_mps=True, left_out=left_out))
    found = [row[0]["case"] for row in rows]
    both = ["alone"] * 2 + ["together"] * 2 + ["two_gpus"] * 2
    assert found == (both if failure else both + ["mps"] * 2) and left_out == said
    assert "quit" in log.read_text()


def test_a_run_without_time_says_what_it_left_out(checkpoint: Path) -> None:
    settings = Settings(ModelConfig.load(checkpoint), "cpu", "checkpoint", (1,), 48, 12, 4)
    left_out: dict[str, str] = {}
    assert not list(cases.measure_all(settings, Limit.after(0), 1.0, apart=False, under_mps=True, left_out=left_out))
    assert left_out == {"rest of alone, and all behind it": "the time is up, and the talker was not ready"}


# Answers as the real one does; notes what it is asked, and where its pipes are.
CONTROL = """#!/bin/sh
echo "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> {log}
{answer}
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> Path:
    program, log = folder / mps.PROGRAM, folder / "log"
    program.write_text(CONTROL.format(log=log, answer=answer))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return log


def test_the_daemon_has_directories_of_its_own_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, "echo 4711")
    with pytest.raises(RuntimeError, match="measured"), mps.daemon() as daemon:
        daemon.check_clients()
        pipes = Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipes.is_dir() and Path(daemon.environment["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        raise RuntimeError("measured")
    assert not pipes.exists()
    asked = [" ".join(line.split()) for line in log.read_text().splitlines()]
    assert asked == [f"-d {pipes}", f"get_server_list {pipes} 1", f"quit -t 5 {pipes} 1"]


def test_a_daemon_without_a_server_is_no_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "true")
    with pytest.raises(StageError, match="no server"), mps.daemon() as daemon:
        daemon.check_clients()


def test_a_daemon_that_does_not_start_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "echo no permission; exit 3")
    with pytest.raises(StageError, match="3: no permission"), mps.daemon():
        pass


def test_a_machine_without_mps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageError, match="not installed"), mps.daemon():
        pass
