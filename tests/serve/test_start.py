"""A tritonserver that loses a model's process while it loads is started again, and not for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve.tritonserver import MAX_STARTS, TritonServer

# At its first MISHAPS starts, which it counts in a file, it says SAYS and waits, or aborts if there is nothing to say.
SERVER = f"""#!{sys.executable}
import http.server, os, pathlib, signal, sys
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
starts = pathlib.Path(os.environ["STARTS"])
starts.write_text(starts.read_text() + "x")
print("start", len(starts.read_text()), flush=True)
if len(starts.read_text()) <= int(os.environ["MISHAPS"]):
    print(os.environ["SAYS"], flush=True)
    signal.pause() if os.environ["SAYS"] else os.abort()
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((options["--http-address"], int(options["--http-port"])), Ready).serve_forever()
"""
FAILED = "failed to load 'talker' version 1: Internal: "
UNHEALTHY = "Stub process 'talker_0_0' is not healthy"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> TritonServer:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(SERVER)
    program.chmod(0o755)
    (tmp_path / "starts").write_text("")
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    mishaps, says = request.param
    environment = {"STARTS": str(tmp_path / "starts"), "MISHAPS": str(mishaps), "SAYS": says}
    return TritonServer(tmp_path, log_path=tmp_path / "server.log", environment=environment)


@pytest.mark.parametrize("server", [(MAX_STARTS - 1, ""), (1, FAILED + UNHEALTHY)], indirect=True)
def test_a_lost_process_is_survived(server: TritonServer, tmp_path: Path) -> None:
    with server:
        first = server.pid
        server.wait_ready(60)
        assert server.running and server.pid != first
    starts = len((tmp_path / "starts").read_text())
    assert (tmp_path / "server.log").read_text().startswith(f"start {starts}\n")
    assert (tmp_path / "server.crashed.log").read_text().startswith(f"start {starts - 1}\n")


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ((MAX_STARTS, ""), "tritonserver ended with code -6; log: "),
        ((MAX_STARTS, FAILED + UNHEALTHY), f"{UNHEALTHY}; log: "),
    ],
    indirect=["server"],
)
def test_one_that_is_lost_every_time_is_told(server: TritonServer, told: str, tmp_path: Path) -> None:
    with server, pytest.raises(ConfigError, match=told):
        server.wait_ready(60)
    assert (tmp_path / "starts").read_text() == "x" * MAX_STARTS


@pytest.mark.parametrize("server", [(1, FAILED + "no such checkpoint")], indirect=True)
def test_a_model_that_does_not_load_is_not_tried_again(server: TritonServer, tmp_path: Path) -> None:
    with server, pytest.raises(ConfigError, match="the model 'talker' did not load"):
        server.wait_ready(60)
    assert (tmp_path / "starts").read_text() == "x"
