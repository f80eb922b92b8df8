"""``vllm bench serve --omni`` as it is published, against the running stack."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.openai_frontend.conftest import MODEL
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

TIMEOUT_S = 280  # of the installation, and of the bench
pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(2 * TIMEOUT_S + 300)]
REQUIREMENTS = Path(__file__).with_name("vllm_omni_requirements.txt")
QUESTION = Path(__file__).parents[1] / "data" / "question.wav"
SENTENCES = ("The sea is wide.", "The sky is blue.", "Rain falls on the road.")
METRICS = "ttft,tpot,itl,e2el,audio_ttfp,audio_rtf,audio_duration"
# Of the null engines: 40 tokens, 3.72 frames each.
TOKENS, FRAMES = 40, 149


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a Python that has vLLM-Omni beside vLLM; nobody else may see it, since it changes vLLM when it is there."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vllm in this environment")
    target = tmp_path_factory.mktemp("vllm_omni")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--target", str(target), "--requirement", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return os.environ | {"PYTHONPATH": str(target), "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def seed_tts(tmp_path: Path) -> Path:
    """A data set in the form of Seed-TTS: sentences to speak, each with a recording whose voice it should have."""
    (tmp_path / "en").mkdir()
    shutil.copy(QUESTION, tmp_path / "en" / "question.wav")
    rows = [f"{number}|hello|question.wav|{sentence}" for number, sentence in enumerate(SENTENCES)]
    (tmp_path / "en" / "meta.lst").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_its_own_figures_of_our_streams(
    environment: dict[str, str],
    seed_tts: Path,
    null_frontend: FrontendProcess,
    null_server: TritonServer,
    tmp_path: Path,
):
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "bench", "serve", "--omni"]
    command += ["--backend", "openai-chat-omni", "--endpoint", "/v1/chat/completions", "--base-url", null_frontend.url]
    command += ["--model", MODEL, "--tokenizer", str(null_server.checkpoint), "--dataset-name", "seed-tts"]
    command += ["--dataset-path", str(seed_tts), "--seed-tts-locale", "en", "--num-prompts", "6"]
    command += ["--max-concurrency", "3", "--num-warmups", "1", "--percentile-metrics", METRICS, "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["completed"], told["failed"]) == (6, 0), done.stdout[-4000:]
    assert told["total_output_tokens"] == 6 * TOKENS
    assert told["total_audio_frames"] == 6 * (FRAMES * 1_920 - 555)
    assert told["num_ttft_samples"] == told["num_audio_ttfp_samples"] == told["num_audio_rtf_samples"] == 6
    assert 0 < told["mean_ttft_ms"] <= told["mean_audio_ttfp_ms"] < told["mean_e2el_ms"]
    assert told["mean_audio_rtf"] > 0
