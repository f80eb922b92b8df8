"""Two thousand requests at 64 streams, under each Python that models may run under; and a stage that dies."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.servers import READY_TIMEOUT_S
from tests.triton.client import ENDLESS, HELLO, Answer, gauges, omni, open_sessions, speech
from triton_omni.serve.processes import model_stubs

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
REQUESTS, STREAMS = 2000, 64
SAMPLES = 149 * 1920 - 555


def _python(version: str) -> Path | None:
    """An interpreter with NumPy 1: this one, OMNI_PYTHON312, or the slim environment beside the project's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    named = os.environ.get(f"OMNI_PYTHON{version.replace('.', '')}")
    candidates = [named, ROOT / f".venv-{version}" / "bin" / "python", shutil.which(f"python{version}")]
    for candidate in filter(None, candidates):
        check = "import numpy, sys; sys.exit(not numpy.__version__.startswith('1.'))"
        if Path(candidate).exists() and subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:
            return Path(candidate)
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_two_thousand_requests_at_64_streams(make_server, eventually, version: str) -> None:
    python = _python(version)
    if python is None:
        pytest.skip(f"no Python {version} with NumPy 1")
    fast = {
        "thinker": {"null_token_ms": "2", "null_prefill_ms": "1"},
        "talker": {"null_frame_ms": "0.5", "max_sessions": "64"},
    }
    with make_server(fast, {}, null=True, python=python) as server:
        server.wait_ready(READY_TIMEOUT_S)
        stubs = {stub.pid for stub in model_stubs(server.pid)}
        began_s = time.monotonic()
        with ThreadPoolExecutor(STREAMS) as threads:
            answers = list(threads.map(lambda _: _answer(server), range(REQUESTS)))
        responses_per_s = sum(n for _, _, n in answers) / (time.monotonic() - began_s)
        logging.getLogger(__name__).info("Python %s: %.0f responses/s to the client", version, responses_per_s)
        assert {(text, samples) for text, samples, _ in answers} == {(40, SAMPLES)}
        eventually(lambda: open_sessions(server))
        assert {stub.pid for stub in model_stubs(server.pid)} == stubs, "a stub died"
        eventually(lambda: gauges(server)["omni_bls", "finished"] != REQUESTS)
        log = server.log_path.read_text(errors="replace")
        assert "is not healthy" not in log and "Traceback" not in log


def _answer(server) -> tuple[int, int, int]:
    answer = Answer(omni(server, speech()))
    assert answer.end["finish_reason"] == "stop"
    return len(answer.text.split()), answer.audio.size, len(answer.parts)


def test_a_stage_that_dies_ends_its_requests(make_server) -> None:
    """Triton itself ends no stream of a dead model."""
    slow = {"talker": {"null_frame_ms": "100"}}
    with make_server(slow, {"omni_bls": 1}, null=True) as server:
        server.wait_ready(READY_TIMEOUT_S)
        responses = iter(omni(server, speech(talker=ENDLESS)))
        while not next(responses)["AUDIO"].size:
            pass
        (talker,) = (stub for stub in model_stubs(server.pid) if "'talker'" in stub.name)
        os.kill(talker.pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match=r"^stage_failed \[talker\]: "):
            list(responses)
        assert Answer(omni(server, {"messages": HELLO})).end["finish_reason"] == "stop", "text needs no talker"
