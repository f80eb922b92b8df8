"""scripts/perf_analyzer.sh with the real tool on the running demo server: every shipped input is taken, and the figures
that it makes of the exported profile and of Triton's statistics fit together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from triton_omni.serve.tritonserver import TritonServer

# On a loaded machine an answer of the shipped length takes half a minute.
pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 2
FRAMES, SAMPLES_PER_FRAME, LOOKAHEAD_SAMPLES = 149, 1920, 555
TIMEOUT_S = 840
AUDIO_S = (FRAMES * SAMPLES_PER_FRAME - LOOKAHEAD_SAMPLES) / 24_000


def run(server: TritonServer, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "perf_analyzer.sh"), "--url", server.grpc_target, "--out", str(out), *arguments]
    environment = os.environ | {"OMNI_PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("demo_server", ["transformers"], indirect=True)
def test_every_model(demo_server: TritonServer, tmp_path: Path) -> None:
    done = run(demo_server, tmp_path, "--", "--concurrency-range", "2", "--request-count", str(REQUESTS))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    cases = {name: one["levels"][0] for name, one in report.items()}
    assert list(cases) == ["omni_bls_text", "omni_bls_audio", "thinker_text", "thinker_audio", "talker", "code2wav"]
    for name, level in cases.items():
        assert level["load"] == "concurrency 2" and level["requests"] >= REQUESTS
        assert 0 < level["first_response_ms"] <= level["last_response_ms"] <= level["last_response_p99_ms"]
        assert level["first_response_ms"] <= level["first_response_p99_ms"]
        assert level["requests_per_s"] > 0 and level["responses"] >= level["requests"]
        assert "--concurrency-range 2" in report[name]["command"]
    for name in ("omni_bls_text", "omni_bls_audio"):
        level = cases[name]
        assert level["first_response_ms"] <= level["first_text_ms"] <= level["last_response_ms"]
        assert level["first_response_ms"] < level["first_audio_ms"] < level["last_response_ms"]
        assert level["responses"] > 4 * level["requests"] and 0 <= level["gap_ms"] <= level["gap_p99_ms"]
        assert level["audio_s"] == pytest.approx(AUDIO_S, abs=0.001) and level["audio_s_per_s"] > 0
        below = {child["model"]: child for child in report[name]["children"]}
        assert below.keys() == {"thinker", "talker", "code2wav"}
        assert below["code2wav"]["requests"] > 2 and below["talker"]["requests"] >= 2
        assert below["thinker"]["requests"] == (2 if name == "omni_bls_audio" else 1)  # with media: "rows", too
        assert below["code2wav"]["execute_ms"] > 0 and 1 <= below["code2wav"]["batch"] <= 2
    for name in ("thinker_text", "thinker_audio"):
        assert cases[name]["first_response_ms"] <= cases[name]["first_text_ms"] <= cases[name]["last_response_ms"]
    assert cases["talker"]["responses"] > 2 * cases["talker"]["requests"]  # opened, then each chunk
    assert (
        cases["talker"]["first_response_ms"] < cases["talker"]["first_audio_ms"] < cases["talker"]["last_response_ms"]
    )
    assert cases["code2wav"]["responses"] == cases["code2wav"]["requests"]
    for child in ("thinker", "talker", "code2wav"):  # the tool's own table of what omni_bls asked
        assert "Inferences/Second" in (tmp_path / f"{child}_v1.omni_bls_text.csv").read_text()
    assert "first_audio_ms" in done.stdout and "execute_ms" in done.stdout


@pytest.mark.parametrize("demo_server", ["transformers"], indirect=True)
def test_what_is_wrong_is_told(demo_server: TritonServer, tmp_path: Path) -> None:
    unknown = run(demo_server, tmp_path, "--only", "vocoder")
    assert unknown.returncode == 2 and "code2wav" in unknown.stderr
    refused = run(demo_server, tmp_path, "--only", "thinker_text", "--", "--no-such-option")
    assert refused.returncode == 1 and "no-such-option" in refused.stdout + refused.stderr
