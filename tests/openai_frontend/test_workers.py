"""Workers as processes, with TLS: one that dies leaves nobody waiting, and replacing them fails nobody's request."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import trustme

from tests.openai_frontend.test_server import CHAT, KEY, OTHER_KEY, START_TIMEOUT_S, WAITING, serving

REQUEST = b"GET /health/live HTTP/1.1\r\nhost: frontend\r\nconnection: close\r\n\r\n"
ANSWERED, CLOSED = b"HTTP/1.1 200 OK", b""


def certified(authority: trustme.CA, directory: Path) -> list[str]:
    """A new certificate in the same files; the options that name them."""
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    return ["--ssl-certfile", str(directory / "cert.pem"), "--ssl-keyfile", str(directory / "key.pem")]


def workers_of(pid: int) -> list[int]:
    """The processes that it has spawned to answer."""
    lists = [children.read_text().split() for children in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = [int(child) for children in lists for child in children]
    return [child for child in pids if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def kill(pid: int) -> None:
    """Returns when it has ended."""
    with os.fdopen(os.pidfd_open(pid)) as process:
        os.kill(pid, signal.SIGKILL)
        assert select.select([process], [], [], START_TIMEOUT_S)[0]


def told(client: ssl.SSLSocket) -> bytes:
    """The first line of an answer, or that the connection ended."""
    try:
        client.sendall(REQUEST)
        return client.recv(4096).partition(b"\r\n")[0]
    except (ConnectionError, ssl.SSLError):
        return CLOSED


def test_a_worker_that_dies_leaves_nobody_waiting(checkpoint: Path, tmp_path: Path):
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    options = [*certified(authority, tmp_path), "--workers", "2", "--drain-s", "1"]
    with serving(checkpoint, *options, url="https", verify=trusting) as server:
        port = int(server.url.rpartition(":")[2])

        def connected(count: int) -> list[ssl.SSLSocket]:
            sockets = [socket.create_connection(("127.0.0.1", port), START_TIMEOUT_S) for _ in range(count)]
            return [trusting.wrap_socket(each, server_hostname="127.0.0.1") for each in sockets]

        before = connected(6)  # some worker has each: it has answered the handshake
        dying, _ = workers_of(server.process.pid)
        kill(dying)
        after = connected(6)
        assert {told(client) for client in before} <= {ANSWERED, CLOSED}
        assert {told(client) for client in after} == {ANSWERED}
        for client in before + after:
            client.close()


def test_a_reload_gives_new_connections_to_new_workers_and_lets_old_ones_finish(
    checkpoint: Path, tmp_path: Path, eventually: Callable[..., None]
):
    """Under requests all the time, none of which fails, with answers open in old workers."""
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    keys = tmp_path / "keys"
    keys.write_text("sesame-1\n")
    options = [*certified(authority, tmp_path), "--api-keys-file", str(keys), "--workers", "2", "--drain-s", "600"]
    with serving(checkpoint, *options, url="https", verify=trusting) as server, contextlib.ExitStack() as open_answers:
        pid, port = server.process.pid, int(server.url.rpartition(":")[2])

        def asked(count: int, key: Mapping[str, str]) -> set[tuple[int, bytes | None]]:
            """The answers' statuses and the certificates of so many new connections, all of them open at once, so that
            every worker that is handed any has some.
            """
            answers = set()
            with contextlib.ExitStack() as held:
                for _ in range(count):
                    connection = http.client.HTTPSConnection(
                        "127.0.0.1", port, timeout=START_TIMEOUT_S, context=trusting
                    )
                    held.enter_context(contextlib.closing(connection))
                    connection.request("GET", "/v1/models", headers=key)
                    certificate = connection.sock.getpeercert(True)
                    answer = connection.getresponse()
                    answer.read()
                    answers.add((answer.status, certificate))
            return answers

        def presented() -> bytes | None:
            [(status, certificate)] = asked(1, KEY)
            assert status == 200
            return certificate

        former, old_certificate = set(workers_of(pid)), presented()
        streams = []
        for _ in former:  # one for each worker, if both have begun to answer
            client = open_answers.enter_context(server.client(headers=KEY))
            streams.append(open_answers.enter_context(client.stream("POST", CHAT, json=WAITING)).iter_lines())
            assert next(streams[-1])
        certified(authority, tmp_path)
        keys.write_text("sesame-1\nsesame-2\n")
        server.process.send_signal(signal.SIGHUP)

        def replaced() -> bool:
            certificates = [presented() for _ in range(4)]
            others = asked(20, OTHER_KEY)  # old workers do not know this key
            new = old_certificate not in (*certificates, *(certificate for _, certificate in others))
            return new and {status for status, _ in others} == {200} and len({*workers_of(pid)} - former) == 2

        eventually(lambda: not replaced(), START_TIMEOUT_S)
        assert {status for status, _ in asked(20, OTHER_KEY)} == {200}
        finishing = former & set(workers_of(pid))
        assert finishing  # the open answers
        for each in finishing:
            with contextlib.suppress(ProcessLookupError):  # it had none, and is gone
                os.kill(each, signal.SIGUSR1)  # lets those go on to their end
        for lines in streams:
            assert [line for line in lines if line][-1] == "data: [DONE]"
        eventually(lambda: bool(former & set(workers_of(pid))), START_TIMEOUT_S)
        assert presented() != old_certificate
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(START_TIMEOUT_S) == 0
