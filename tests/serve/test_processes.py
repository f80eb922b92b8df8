from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve.processes import (
    STUB,
    Watched,
    check_ports_free,
    child_pids,
    model_stubs,
    wait_first_exit,
)

# Ends when its standard input closes.
IDLE = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def idle_process(*command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_taken_port_is_named_with_its_option(listener: int) -> None:
    with pytest.raises(ConfigError, match=rf"port {listener} on 127\.0\.0\.1 .*in use.*--grpc-port") as raised:
        check_ports_free([("--grpc-port", "127.0.0.1", listener)])
    assert raised.value.field == "--grpc-port"


def test_a_port_taken_on_one_address_is_taken_for_all(listener: int) -> None:
    with pytest.raises(ConfigError, match=f"port {listener} on 0.0.0.0"):
        check_ports_free([("--port", "0.0.0.0", listener)])


def test_one_port_cannot_serve_twice() -> None:
    with pytest.raises(ConfigError, match="--http-port and --port are both 9000"):
        check_ports_free([("--port", "127.0.0.1", 9000), ("--http-port", "127.0.0.1", 9000)])


def test_free_ports_pass(listener: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    check_ports_free([("--port", "127.0.0.1", port)])


def test_an_unknown_address_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid") as raised:
        check_ports_free([("--port", "no-such-host.invalid", 9000)])
    assert raised.value.field == "--port"


def test_the_first_process_to_end_is_reported() -> None:
    with idle_process(sys.executable, "-c", IDLE) as stays, idle_process(sys.executable, "-c", IDLE) as ends:
        assert {stays.pid, ends.pid} <= set(child_pids(os.getpid()))
        ends.kill()
        first = wait_first_exit([Watched("stays", stays.pid), Watched("ends", ends.pid)])
        assert first == Watched("ends", ends.pid)
        assert ends.wait() != 0
        assert wait_first_exit([Watched("stays", stays.pid), Watched("ends", ends.pid)]).name == "ends"


def test_stubs_are_named_after_their_models(tmp_path: Path) -> None:
    stub = tmp_path / STUB
    stub.symlink_to(Path(sys.executable).resolve())
    model = tmp_path / "talker" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text(IDLE)
    with idle_process(str(stub), str(model)) as process:
        assert Watched("a process of the model 'talker'", process.pid) in model_stubs(os.getpid())
        process.communicate()
