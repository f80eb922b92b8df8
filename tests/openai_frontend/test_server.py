"""The frontend as a process: TLS, keys, limits and large bodies on the wire; workers; the way to its end."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from openai_frontend.command_line import parse_settings
from openai_frontend.main import main
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import WITHIN_S
from tests.openai_frontend.scripted_server import WAIT
from tests.openai_frontend.test_metrics import figures
from triton_omni.serve.tritonserver import free_ports

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer sesame-1"}
OTHER_KEY = {"authorization": "Bearer sesame-2"}
START_TIMEOUT_S = 240


def body(words: int, content: str = "?", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": words, **more}


WAITING = body(60, WAIT, stream=True)


@contextlib.contextmanager
def serving(checkpoint: Path, *options: str, url: str = "http", verify: Any = True) -> Iterator[Server]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.openai_frontend.scripted_server", "--port", str(port)]
    command += ["--checkpoint", str(checkpoint), "--model-name", MODEL, *options]
    server = Server(f"{url}://127.0.0.1:{port}", subprocess.Popen(command, cwd=ROOT), verify)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


class Server:
    def __init__(self, url: str, process: subprocess.Popen[bytes], verify: Any) -> None:
        self.url = url
        self.process = process
        self.verify = verify

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.verify, timeout=60, **options)

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, "the frontend ended"
            with contextlib.suppress(httpx.TransportError), self.client() as client:
                if client.get("/health/live").status_code == 200:
                    return
            time.sleep(0.1)
        pytest.fail("the frontend does not answer")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two keys, each with 30 requests a minute and 2 at once; TLS; bodies up to 10,000 bytes."""
    directory = tmp_path_factory.mktemp("guarded")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    (directory / "keys").write_text("sesame-1\nsesame-2\n")
    options = ["--ssl-certfile", str(directory / "cert.pem"), "--ssl-keyfile", str(directory / "key.pem")]
    options += ["--api-keys-file", str(directory / "keys"), "--max-body-bytes", "10000"]
    options += ["--requests-per-minute", "30", "--max-concurrent-requests", "2"]
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with serving(checkpoint, *options, url="https", verify=trusting) as server:
        yield server


def test_tls(guarded: Server):
    with guarded.client() as client:
        assert client.get("/v1/models", headers=KEY).status_code == 200
    with httpx.Client(base_url=guarded.url) as strict, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY"):
        strict.get("/health/live")
    with httpx.Client(base_url=guarded.url.replace("https", "http")) as plain, pytest.raises(httpx.TransportError):
        plain.get("/health/live")


def test_keys(guarded: Server):
    with guarded.client() as client:
        refused = client.post(CHAT, json=body(1))
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.headers["x-request-id"]
        assert client.post(CHAT, json=body(1), headers=KEY).json()["choices"][0]["message"]["content"] == "w0 "
        assert client.get("/health/ready").status_code == client.get("/metrics").status_code == 200


def test_a_body_without_a_declared_length_is_counted(guarded: Server):
    headers = KEY | {"content-type": "application/json"}
    with guarded.client() as client:
        for content in (b" " * 10_001, iter([b" " * 1_000] * 11)):
            refused = client.post(CHAT, content=content, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
            assert refused.headers["connection"] == "close"  # else an endless one would be read for ever


def test_requests_at_once_and_a_minute(guarded: Server):
    with guarded.client(headers=OTHER_KEY) as client, contextlib.ExitStack() as open_answers:
        answers = [open_answers.enter_context(client.stream("POST", CHAT, json=WAITING)) for _ in "12"]
        streams = [answer.iter_lines() for answer in answers]
        assert all(next(stream) for stream in streams)
        refused = client.post(CHAT, json=body(1))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert client.post(CHAT, json=body(1), headers=KEY).status_code == 200  # another key's places are its own
    with guarded.client(headers=OTHER_KEY) as client:
        told = [client.post(CHAT, json={})]
        while "requests a minute" not in told[-1].text and len(told) < 300:
            told.append(client.post(CHAT, json={}))
        assert {answer.status_code for answer in told} == {400, 429}
        assert 1 <= int(told[-1].headers["retry-after"]) <= 2


def test_a_stop_lets_answers_finish_and_takes_no_new_ones(checkpoint: Path):
    with serving(checkpoint, "--drain-s", "300") as server, server.client() as client:
        with client.stream("POST", CHAT, json=WAITING) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            with server.client() as other:
                ready = _eventually_503(other)
                assert "shutting down" in ready.json()["waiting_for"][0]
                assert other.get("/health/live").status_code == 200
                refused = other.post(CHAT, json=body(1))
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
                assert refused.headers["retry-after"]
            server.process.send_signal(signal.SIGUSR1)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert text == "".join(f"w{number} " for number in range(60))
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        server.process.wait(WITHIN_S)


def _eventually_503(client: httpx.Client) -> httpx.Response:
    deadline_s = time.monotonic() + WITHIN_S
    while (ready := client.get("/health/ready")).status_code == 200:
        assert time.monotonic() < deadline_s, "still ready after the stop"
    return ready


def test_an_answer_that_takes_too_long_is_cut_off(checkpoint: Path):
    with serving(checkpoint, "--drain-s", "1") as server, server.client() as client:
        with client.stream("POST", CHAT, json=WAITING) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopped_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in lines:
                    pass
        server.process.wait(WITHIN_S)
        assert time.monotonic() - stopped_s > 0.9


def test_an_idle_server_stops_at_once(checkpoint: Path):
    with serving(checkpoint, "--drain-s", "300") as server:
        server.process.send_signal(signal.SIGINT)
        server.process.wait(WITHIN_S)


def test_workers_share_a_port_and_their_metrics(checkpoint: Path, eventually: Callable[..., None]):
    with serving(checkpoint, "--workers", "2", "--drain-s", "1") as server:
        for _ in range(20):
            with server.client() as client:  # a connection of its own, so that any worker may take it
                assert client.get("/v1/models").status_code == 200
        with server.client() as client:

            def counted() -> float:
                return figures(client.get("/metrics").text)["requests_total", "/v1/models", "200"]

            eventually(lambda: counted() != 20, WITHIN_S)  # a request is counted when its answer has left
            assert {counted() for _ in range(3)} == {20}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WITHIN_S) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--workers", "0"], "--workers: must be at least 1"),
        (["--api-keys-file", "missing"], "--api-keys-file: cannot be read"),
        (["--ssl-certfile", "cert.pem"], "--ssl-keyfile: is missing"),
        (["--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem"], "--ssl-certfile: cert.pem is no file"),
        (["--requests-per-minute", "-1"], "--requests-per-minute: must be at least 0"),
        (["--max-media-bytes", "0"], "--max-media-bytes: must be at least 1"),
        (["--audio-id-lifetime-s", "-1"], "--audio-id-lifetime-s: must be at least 0"),
        (["--stall-timeout-s", "nan"], "--stall-timeout-s: must be above 0"),
        (["--port", "99999"], "--port: must be a port from 0 to 65535"),
        (["--log-level", "loud"], "--log-level: must be one of debug, info, warning, error"),
        (["--cors-origins", "app.example"], "--cors-origins: must hold origins"),
        (["--drain", "1"], "unrecognized arguments"),
    ],
)
def test_options_that_do_not_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str):
    with pytest.raises(SystemExit):
        parse_settings(["--checkpoint", str(checkpoint), *options], {})
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--triton-url", "box"], "--triton-url: must be HOST:PORT"),
        (["--allowed-local-media-path", "missing"], "--allowed-local-media-path: missing is no directory"),
        (["--allowed-media-domains", "http://x/"], "--allowed-media-domains: must hold host names"),
    ],
)
def test_options_that_are_found_out_later(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    told: str,
):
    monkeypatch.setattr(sys, "argv", ["openai_frontend", "--checkpoint", str(checkpoint), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert told in str(ended.value)


def test_a_key_of_the_environment_that_no_header_can_carry(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_settings(["--checkpoint", str(checkpoint)], {"OMNI_API_KEYS": "a b"})
    assert "error: OMNI_API_KEYS: key 1 holds a space" in capsys.readouterr().err
