"""What the supervisor does about a dead replica, with idle processes for stubs and a server that only keeps them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve import replicas
from triton_omni.serve.processes import STUB, Watched
from triton_omni.serve.replicas import Replicas
from triton_omni.serve.repository import read_config, render

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
IDLE = "import sys; sys.stdin.read()"


class Server:
    """Starts and forgets stubs as Triton does when it loads a model whose instance groups have changed."""

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.model_repository = render(REPOSITORY, folder / "repository", instances={"talker": 2})
        self.stubs: dict[str, subprocess.Popen[bytes]] = {}
        self.loads: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self._stub = folder / STUB
        self._stub.symlink_to(Path(sys.executable).resolve())
        self._model = folder / "talker" / "1" / "model.py"
        self._model.parent.mkdir(parents=True)
        self._model.write_text(IDLE)

    def load(self, model: str, timeout_s: float | None = None) -> None:
        names = [f"{group.name}_0" for group in read_config(self.model_repository / model).instance_group]
        self.loads.put(names)
        if self.failure is not None and len(names) == 2:
            raise self.failure
        for name in names:
            if name not in self.stubs:
                words = [str(self._stub), str(self._model), *"234567", name]
                self.stubs[name] = subprocess.Popen(words, stdin=subprocess.PIPE)
        for name in set(self.stubs) - set(names):
            del self.stubs[name]

    def kill(self, name: str) -> int:
        process = self.stubs[name]
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return process.pid


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.load("talker")
    server.loads.get()
    yield server
    for process in server.stubs.values():
        with contextlib.suppress(OSError):
            process.communicate()


@pytest.fixture
def ended(server: Server) -> Iterator[queue.SimpleQueue[Watched]]:
    """What ``watch`` returns."""
    result: queue.SimpleQueue[Watched] = queue.SimpleQueue()
    watching = Replicas(server)  # type: ignore[arg-type]
    with watching:
        threading.Thread(target=lambda: result.put(watching.watch([])), daemon=True).start()
        yield result


BOTH, FIRST, SECOND = ["talker_0_0", "talker_1_0"], ["talker_0_0"], ["talker_1_0"]


def test_a_dead_replica_is_taken_out_and_started_again(
    server: Server, ended: queue.SimpleQueue[Watched], eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pid = server.kill("talker_0_0")
    assert [server.loads.get(timeout=60), server.loads.get(timeout=60)] == [SECOND, BOTH]
    assert f"(talker_0_0, process {pid}) died, and its sessions with it; replicas of talker left: 1" in caplog.text
    eventually(lambda: "talker_0_0 is there again" not in caplog.text)
    server.kill("talker_1_0")
    assert [server.loads.get(timeout=60), server.loads.get(timeout=60)] == [FIRST, BOTH]
    eventually(lambda: caplog.text.count("is there again") != 2)
    assert ended.empty()


def test_one_that_dies_again_at_once_stays_out(
    server: Server, ended: queue.SimpleQueue[Watched], eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.kill("talker_0_0")
    eventually(lambda: "is there again" not in caplog.text)
    server.kill("talker_0_0")
    assert [server.loads.get(timeout=60) for _ in range(3)] == [SECOND, BOTH, SECOND]
    eventually(lambda: "talker_0_0 stays out: it died" not in caplog.text)
    last = server.kill("talker_1_0")
    assert ended.get(timeout=60).pid == last, "nobody is left"


def test_one_that_lives_longer_gets_another_chance(
    server: Server,
    ended: queue.SimpleQueue[Watched],
    eventually: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(replicas, "PROBATION_S", 0.0)
    for number in (1, 2):
        server.kill("talker_0_0")
        eventually(lambda number=number: caplog.text.count("is there again") != number)


@pytest.mark.parametrize("failure", [ConfigError("out of memory"), RuntimeError("out of luck")])
def test_one_that_does_not_load_stays_out(
    server: Server,
    ended: queue.SimpleQueue[Watched],
    eventually: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
) -> None:
    server.failure = failure
    server.kill("talker_0_0")
    eventually(lambda: f"talker_0_0 stays out: {failure}" not in caplog.text)
    names = [group.name for group in read_config(server.model_repository / "talker").instance_group]
    assert names == ["talker_1"], "what Triton has is what the file says"
    assert ended.empty()


def test_the_last_replica_ends_the_server(
    server: Server, ended: queue.SimpleQueue[Watched], eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    server.failure = ConfigError("out of memory")
    server.kill("talker_0_0")
    eventually(lambda: "stays out" not in caplog.text)
    last = server.kill("talker_1_0")
    found = ended.get(timeout=60)
    assert (found.pid, found.instance) == (last, "talker_1_0")
