from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve import processes
from triton_omni.serve.processes import (
    STUB,
    Exits,
    LoadingStubs,
    Watched,
    check_ports_free,
    child_pids,
    free_ports,
    model_stubs,
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
    ports = free_ports(3)
    assert len({*ports, listener}) == 4
    check_ports_free([(f"--port-{port}", "127.0.0.1", port) for port in ports])


@pytest.mark.parametrize("given", ["16010 60999", "1024 65535", None])
def test_free_ports_are_none_that_the_system_gives_where_it_leaves_some(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    monkeypatch.setattr(processes, "_GIVEN_PORTS", file)
    if given:
        file.write_text(given + "\n")
    assert len({*free_ports(4)}) == 4
    assert given != "16010 60999" or all(16_000 <= port < 16_010 for port in free_ports(1))


def test_an_unknown_address_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid") as raised:
        check_ports_free([("--port", "no-such-host.invalid", 9000)])
    assert raised.value.field == "--port"


def test_the_first_process_to_end_is_reported() -> None:
    with idle_process(sys.executable, "-c", IDLE) as stays, idle_process(sys.executable, "-c", IDLE) as ends:
        assert {stays.pid, ends.pid} <= set(child_pids(os.getpid()))
        with Exits([Watched("stays", stays.pid), Watched("ends", ends.pid)]) as exits:
            ends.kill()
            assert exits.wait() == Watched("ends", ends.pid)
            assert ends.wait() != 0
            exits.add(Watched("ends", ends.pid))
            assert exits.wait().name == "ends", "a process that has gone already"
            stays.kill()
            assert exits.wait().name == "stays"
            stays.wait()


@contextlib.contextmanager
def stub_process(folder: Path, instance: str = "talker") -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a stub of the model "talker", below this one."""
    stub = folder / STUB
    model = folder / "talker" / "1" / "model.py"
    if not stub.exists():
        stub.symlink_to(Path(sys.executable).resolve())
        model.parent.mkdir(parents=True)
        model.write_text(IDLE)
    with idle_process(str(stub), str(model), *"234567", instance) as process:
        yield process
        process.communicate()


@pytest.fixture
def talker_stub(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with stub_process(tmp_path) as process:
        yield process


def test_stubs_are_named_after_their_models(talker_stub: subprocess.Popen[bytes]) -> None:
    assert Watched("a process of the model 'talker'", talker_stub.pid) in model_stubs(os.getpid())


def test_a_model_that_loses_its_stub_while_it_loads_is_noticed(talker_stub: subprocess.Popen[bytes]) -> None:
    stubs, patient = (LoadingStubs(os.getpid(), period_s=0, grace_s=grace_s) for grace_s in (0, 60))
    assert stubs.lost() is None
    assert patient.lost() is None
    talker_stub.kill()
    talker_stub.wait()
    assert stubs.lost() == "a process of the model 'talker'"
    assert patient.lost() is None


def test_a_model_whose_stub_is_replaced_is_not_lost(tmp_path: Path) -> None:
    stubs = LoadingStubs(os.getpid(), period_s=0, grace_s=0)
    with stub_process(tmp_path):
        with stub_process(tmp_path):
            assert stubs.lost() is None
        assert stubs.lost() is None
    assert stubs.lost() is not None


def test_a_replica_that_is_lost_while_the_others_load_is_noticed(tmp_path: Path) -> None:
    stubs = LoadingStubs(os.getpid(), period_s=0, grace_s=0, replica_grace_s=0)
    with stub_process(tmp_path, "talker_0_0"):
        with stub_process(tmp_path, "talker_1_0"):
            assert stubs.lost() is None
        assert stubs.lost() == "a process of the model 'talker' (talker_1_0)"


def test_a_model_that_tritonserver_forgets_after_it_has_loaded_is_noticed(tmp_path: Path) -> None:
    stubs, patient = (LoadingStubs(os.getpid(), period_s=0, forgotten_grace_s=grace_s) for grace_s in (-1, 60))
    with stub_process(tmp_path, "talker_0_0"), stub_process(tmp_path, "talker_1_0"):
        assert stubs.lost() is None and patient.lost() is None
        both = {"talker_0_0", "talker_1_0"}
        assert stubs.forgotten({"talker_0_0"}, set()) is None
        assert stubs.forgotten(both, {"talker"}) is None
        assert stubs.forgotten(both, set()) == "a process of the model 'talker'"
        assert patient.forgotten(both, set()) is None
