"""OpenAI's package for Node, a second client of its own making, against the running stack."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.openai_frontend.conftest import MODEL
from tests.triton.client import open_sessions
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton
SOURCES = Path(__file__).parent / "node"
TEXT = "w0 w1 w2 w3 w4 w5 "
INSTALL_TIMEOUT_S = 240
RUN_TIMEOUT_S = 120

Ask = Callable[[FrontendProcess, str], dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Runs stream.mjs in a directory of its own, with exactly the packages of the lockfile."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on PATH (Debian and Ubuntu: apt-get install nodejs npm)")
    directory = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", ".npmrc", "stream.mjs"):
        shutil.copy(SOURCES / name, directory)
    npm = ["npm", "ci", "--ignore-scripts", "--no-fund", "--no-audit"]
    done = subprocess.run(npm, cwd=directory, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr

    def run(frontend: FrontendProcess, way: str) -> dict[str, Any]:
        command = ["node", "stream.mjs", f"{frontend.url}/v1", MODEL, way]
        told = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    return run


def test_text_and_speech_as_a_stream(ask: Ask, null_frontend: FrontendProcess):
    told = ask(null_frontend, "iterate")
    assert (told["content"], told["transcript"], told["finish"]) == (TEXT, TEXT, ["length"])
    assert len(told["ids"]) == 1
    assert told["ids"][0].startswith("audio-")
    details = told["usage"]["completion_tokens_details"]
    assert details["text_tokens"] == 6
    assert told["bytes"] == 2 * (details["audio_tokens"] * 1_920 - 555)


def test_its_helper_joins_the_deltas(ask: Ask, null_frontend: FrontendProcess):
    told = ask(null_frontend, "accumulate")
    assert (told["content"], told["finish"]) == (TEXT, ["length"])
    assert told["chunks"] > 3


def test_a_refusal_is_its_own_error(ask: Ask, null_frontend: FrontendProcess):
    told = ask(null_frontend, "refused")
    assert (told["refused"], told["status"], told["type"]) == (True, 400, "invalid_request_error")
    assert told["param"] == "audio.voice"
    assert "ethan" in told["message"]


def test_an_abort_ends_the_request_in_every_stage(
    ask: Ask, tight_frontend: FrontendProcess, tight_server: TritonServer, eventually
):
    assert ask(tight_frontend, "abort") == {"aborted": True}
    eventually(lambda: open_sessions(tight_server), 60)
