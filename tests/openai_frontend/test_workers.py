"""Workers as processes, with TLS: one that dies leaves nobody waiting."""

from __future__ import annotations

import os
import select
import signal
import socket
import ssl
from pathlib import Path

import trustme

from tests.openai_frontend.test_server import START_TIMEOUT_S, serving

REQUEST = b"GET /health/live HTTP/1.1\r\nhost: frontend\r\nconnection: close\r\n\r\n"
ANSWERED, CLOSED = b"HTTP/1.1 200 OK", b""


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
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    options = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    options += ["--workers", "2", "--triton-url", "127.0.0.1:1", "--drain-s", "1"]
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
