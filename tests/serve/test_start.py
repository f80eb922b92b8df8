"""A tritonserver that crashes while it loads gets a second chance, and no third."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.servers import READY_TIMEOUT_S
from triton_omni.errors import ConfigError
from triton_omni.serve.tritonserver import TritonServer

# Crashes as often as CRASHES says, which it counts in a file; then it is ready.
SERVER = f"""#!{sys.executable}
import http.server, os, pathlib, sys
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
starts = pathlib.Path(os.environ["STARTS"])
starts.write_text(starts.read_text() + "x")
print("start", len(starts.read_text()), flush=True)
if len(starts.read_text()) <= int(os.environ["CRASHES"]):
    os.abort()
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((options["--http-address"], int(options["--http-port"])), Ready).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> TritonServer:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(SERVER)
    program.chmod(0o755)
    (tmp_path / "starts").write_text("")
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    environment = {"STARTS": str(tmp_path / "starts"), "CRASHES": str(request.param)}
    return TritonServer(tmp_path, log_path=tmp_path / "server.log", environment=environment)


@pytest.mark.parametrize("server", [1], indirect=True)
def test_one_crash_is_survived(server: TritonServer, tmp_path: Path) -> None:
    with server:
        first = server.pid
        server.wait_ready(READY_TIMEOUT_S)
        assert server.running and server.pid != first
    assert (tmp_path / "server.log").read_text().startswith("start 2\n")
    assert (tmp_path / "server.crashed.log").read_text() == "start 1\n"


@pytest.mark.parametrize("server", [2], indirect=True)
def test_two_are_told(server: TritonServer, tmp_path: Path) -> None:
    with server, pytest.raises(ConfigError, match="tritonserver ended with code -6; log: "):
        server.wait_ready(READY_TIMEOUT_S)
    assert (tmp_path / "starts").read_text() == "xx"
