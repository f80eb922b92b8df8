"""scripts/speech_check.py: what is counted as an error, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from triton_omni.serve.frontend import FrontendProcess

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "speech_check.py"
SENTENCES = "One two three, four.\nFive six seven eight!\n"


def run(url: str, directory: Path, *options: str) -> tuple[int, str]:
    (directory / "sentences.txt").write_text(SENTENCES, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--url", url, "--sentences", str(directory / "sentences.txt"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


class Parrot(BaseHTTPRequestHandler):
    """Speech is the text itself; what is heard is what was said, with ``changes``."""

    changes: tuple[str, str] = ("", "")

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "parrot", "object": "model", "created": 0, "owned_by": "us"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/speech"):
            self._send(json.loads(body)["input"].encode(), "audio/wav")
        else:
            (sound,) = re.findall(rb'filename="speech.wav"\r\n[^\r]*\r\n\r\n(.*?)\r\n--', body, re.DOTALL)
            self._answer({"text": sound.decode().upper().replace(*self.changes)})

    def _answer(self, value: object) -> None:
        self._send(json.dumps(value).encode(), "application/json")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def parrot(changes: tuple[str, str]) -> Iterator[str]:
    handler = type("Changed", (Parrot,), {"changes": changes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("changes", "most", "rate", "code"),
    [
        (("!", "."), "0", 0.0, 0),  # case and punctuation are no words
        (("SIX", "SICK"), "0.05", 0.125, 1),
        (("SIX ", ""), "0.125", 0.125, 0),
        (("THREE", "THREE AND"), "0.1", 0.125, 1),
    ],
)
def test_the_rate_is_of_words(tmp_path: Path, changes: tuple[str, str], most: str, rate: float, code: int) -> None:
    with parrot(changes) as url:
        ended, said = run(url, tmp_path, "--max-wer", most, "--out", str(tmp_path / "out.json"))
    assert ended == code, said
    told = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert told["wer"] == rate
    assert [row["said"] for row in told["rows"]] == SENTENCES.splitlines()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    code, said = run("http://127.0.0.1:9", tmp_path)
    assert code == 2
    assert "speech_check.py: Connection error" in said


@pytest.mark.parametrize(("text", "said"), [("\n", "must hold a sentence"), (None, "must be a text file")])
def test_sentences_that_are_none(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "none.txt"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, told = run("http://127.0.0.1:9", tmp_path, "--sentences", str(path))
    assert code == 2
    assert f"argument --sentences: {said}" in told


@pytest.mark.slow
def test_the_demo_speaks_and_hears_but_makes_no_sense(demo_frontend: FrontendProcess, tmp_path: Path) -> None:
    code, said = run(demo_frontend.url, tmp_path, "--max-wer", "0.05", "--out", str(tmp_path / "out.json"))
    assert code == 1, said
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["wer"] > 0.5
