"""A tritonserver that crashes while it loads a row's models is started again with that row."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve.machine import Machine
from triton_omni.sweep.rows import settings
from triton_omni.sweep.stack import Stack

# Ready at once; crashes, or refuses, when it is told to load a model, as often as a file beside it has characters.
SERVER = f"""#!{sys.executable}
import http.server, os, pathlib, sys
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
crashes = pathlib.Path(__file__).with_name("crashes")
class Answer(http.server.BaseHTTPRequestHandler):
    def answer(self, status=200, body=b"[]"):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = answer
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        left = crashes.read_text()
        if self.path.endswith("/load") and left:
            crashes.write_text(left[1:])
            if left[0] == "c":
                os.abort()
            return self.answer(400, b"out of memory")
        self.answer()
http.server.ThreadingHTTPServer((options["--http-address"], int(options["--http-port"])), Answer).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(SERVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return tmp_path


@pytest.mark.parametrize(("crashes", "told"), [("", None), ("c", None), ("r", "out of memory")])
def test_a_crash_is_made_up_for_and_a_refusal_is_told(
    folder: Path, checkpoint: Path, crashes: str, told: str | None
) -> None:
    (folder / "bin" / "crashes").write_text("")
    before, after = (settings(row, "cpu-demo", [], Machine("cpu")) for row in ("async_output", "replicas"))
    with Stack(checkpoint, folder / "stack", 0) as stack:
        stack.apply(before, 60)
        first = stack.server.pid
        (folder / "bin" / "crashes").write_text(crashes)
        if told:
            with pytest.raises(ConfigError, match=re.escape(told)):
                stack.apply(after, 60)
            return
        stack.apply(after, 60)
        assert stack.server.running and (stack.server.pid != first) == bool(crashes)
        assert stack.changed(after) == []
