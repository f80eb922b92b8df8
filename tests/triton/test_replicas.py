"""Replicas of a stage: sessions spread over them and stay where they are; one that dies takes its own with it."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.servers import READY_TIMEOUT_S
from tests.triton.client import ENDLESS, TIMEOUT_S, Answer, omni, open_sessions, speech, take_back
from triton_omni.serve.processes import Watched, model_stubs
from triton_omni.serve.replicas import Replicas
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.slow]

SESSIONS = 16
RESTART_S = 240


@pytest.fixture(scope="module")
def server(make_server) -> Iterator[TritonServer]:
    slow = {"talker": {"null_frame_ms": "100"}}
    with make_server(slow, {"thinker": 2, "talker": 2, "code2wav": 2}, null=True) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server


@pytest.fixture
def supervised(server: TritonServer) -> Iterator[TritonServer]:
    with Replicas(server) as replicas:
        tritonserver = [Watched("tritonserver", server.pid)]
        threading.Thread(target=replicas.watch, args=(tritonserver,), daemon=True).start()
        yield server


def busy(server: TritonServer, stage: str) -> dict[str, int]:
    """Running sessions of each instance that Triton knows."""
    with urllib.request.urlopen(server.metrics_url, timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    pattern = rf'^omni_sessions\{{instance="(\w+)",model="{stage}",state="running"\}} (\d+)'
    return {instance: int(count) for instance, count in re.findall(pattern, text, re.MULTILINE)}


def test_a_dead_replica_takes_its_own_sessions_with_it(
    supervised: TritonServer, eventually, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for stage in ("talker", "code2wav"):
        both = {f"{stage}_0_0", f"{stage}_1_0"}
        keys = [str(uuid.uuid4()) for _ in range(SESSIONS)]
        spoken = [iter(omni(supervised, speech(talker=ENDLESS), cancel_key=key)) for key in keys]
        for responses in spoken:
            while not next(responses)["AUDIO"].size:
                pass
        for each in ("talker", "code2wav"):
            eventually(lambda each=each: sorted(busy(supervised, each).values()) != [SESSIONS // 2] * 2)
        victim = next(stub for stub in model_stubs(supervised.pid) if stub.model == stage)
        os.kill(victim.pid, signal.SIGKILL)
        lost: list[str] = []
        with ThreadPoolExecutor(SESSIONS + 4) as threads:
            outcomes = threads.map(outcome, spoken, keys, repeat(supervised), repeat(lost))
            new = list(threads.map(lambda _: Answer(omni(supervised, speech(talker={"max_frames": 4}))), range(4)))
        assert [answer.end["finish_reason"] for answer in new] == ["length"] * 4
        assert Counter(outcomes) == {
            f"stage_failed [{stage}]: the process that served this request died": SESSIONS // 2,
            "cancelled: the client left": SESSIONS // 2,
        }
        eventually(lambda name=victim.instance: f"{name} is there again" not in caplog.text, RESTART_S)
        assert f"({victim.instance}, process {victim.pid}) died" in caplog.text
        eventually(lambda both=both, stage=stage: set(busy(supervised, stage)) != both)
        eventually(lambda: open_sessions(supervised))
    assert Answer(omni(supervised, speech(talker={"max_frames": 4}))).audio.size == 4 * 1920 - 555


def test_media_rows_come_from_the_thinker_that_has_them(server: TritonServer) -> None:
    """Triton hands the question for them to either replica."""
    content = [{"type": "audio", "media": 0}, {"type": "text", "text": "What is this?"}]
    request = speech(messages=[{"role": "user", "content": content}], talker={"max_frames": 4})
    for _ in range(8):
        assert Answer(omni(server, request, [b"a sound"])).audio.size == 4 * 1920 - 555


def test_nobody_but_the_supervisor_loads_and_unloads_models(server: TritonServer) -> None:
    """Who can load a model can run any code in it."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.http_url}/v2/repository/models/talker/unload", b"{}", timeout=TIMEOUT_S)
    refused.value.close()
    assert refused.value.code == 403
    with grpc.InferenceServerClient(server.grpc_target) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("talker")
        assert client.is_model_ready("talker")


def outcome(responses: Iterator[dict], key: str, server: TritonServer, lost: list[str]) -> str:
    """The error, without what Triton adds, that an endless answer ends with: its own, which is then of ``lost``, or the
    one that comes of taking it back, when half of the answers are lost and this one is still heard.
    """
    chunks = 0
    try:
        for response in responses:
            if response["AUDIO"].size and len(lost) >= SESSIONS // 2:
                chunks += 1
                if chunks == 2:
                    take_back(server, key)
    except InferenceServerException as error:
        lost.append(key)
        return (error.message() or "").partition(" (")[0]
    return "an end"
