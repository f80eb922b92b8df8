"""A server starts, says why when it cannot, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.servers import READY_TIMEOUT_S
from tests.triton.client import ENDLESS, Answer, omni, speech
from triton_omni.errors import ConfigError
from triton_omni.serve.processes import model_stubs
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton


def _traces(server: TritonServer) -> set[str]:
    """Names in /dev/shm and in the directory for temporary files that belong to ``server``."""
    names = set(os.listdir("/dev/shm"))
    return {name for name in names if name.startswith(server.shm_prefix)}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


@pytest.mark.parametrize("how", ["idle", "with an open stream", "after a crash"])
def test_stop_leaves_no_process_port_or_shared_memory(make_server, how: str) -> None:
    server = make_server({"talker": {"null_frame_ms": "100"}}, {}, null=True)
    steps: list[tuple[str, str]] = []
    with server:
        server.wait_ready(READY_TIMEOUT_S, lambda *step: steps.append(step))
        pids = [server.pid, *(stub.pid for stub in model_stubs(server.pid))]
        assert len(pids) == 6 and _traces(server)
        call = omni(server, speech(talker=ENDLESS))
        responses = iter(call)
        next(responses)
        if how == "idle":
            call.cancel()
        elif how == "after a crash":
            os.kill(server.pid, signal.SIGKILL)
    assert not server.running
    assert [pid for pid in pids if _is_running(pid)] == []
    assert [p for p in (server.http_port, server.grpc_port, server.metrics_port) if not _is_free(p)] == []
    assert _traces(server) == set()
    models = ("thinker", "talker", "code2wav", "omni_bls")
    assert sorted(steps) == sorted((model, step) for model in models for step in ("loading", "loaded"))
    if how != "idle":
        call.cancel()


def test_a_server_starts_again(make_server) -> None:
    server = make_server({}, {"omni_bls": 1}, null=True)
    for _ in range(2):
        with server:
            server.wait_ready(READY_TIMEOUT_S)
            assert Answer(omni(server, speech(talker={"max_frames": 4}))).audio.size == 4 * 1920 - 555


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"omni_bls": {"max_request": "4"}},
            "bad_configuration [omni_bls: parameter max_request]: is not known; did you mean 'max_requests'?",
        ),
        (
            {"omni_bls": {"max_requests": "many"}},
            "bad_configuration [omni_bls: parameter max_requests]: must be an integer, got 'many'",
        ),
        (
            {"talker": {"engine": "fast"}},
            "bad_configuration [talker: parameter engine]: must be auto or null, got 'fast'",
        ),
        (
            {"talker": {"null_frame": "1"}},
            "bad_configuration [talker: parameter frame]: is not known; did you mean 'frame_ms'?",
        ),
        ({"thinker": {"checkpoint": "/nowhere"}}, "bad_checkpoint: /nowhere/config.json does not exist"),
    ],
)
def test_a_model_that_cannot_load_says_why(make_server, parameters: dict, message: str) -> None:
    server = make_server(parameters, {}, null=True)
    with pytest.raises(ConfigError) as caught, server:
        server.wait_ready(READY_TIMEOUT_S)
    assert f"the model {next(iter(parameters))!r} did not load" in str(caught.value)
    assert message in str(caught.value)
    assert not server.running and _traces(server) == set()


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(make_server, tmp_path: Path) -> None:
    server = make_server({}, {}, null=True, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        server.start()
    assert not server.running
