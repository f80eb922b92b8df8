"""Whatever a server leaves goes: processes that nothing inside can end, shared memory, temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_omni.serve import reaper

# A leader with a child of its own that takes no signal but SIGKILL and tells when it is there.
SERVER = """
import mmap, os, signal, sys, time, uuid
if os.fork() == 0:
    name = f"psm_{uuid.uuid4().hex}"
    with open(f"/dev/shm/{name}", "wb+") as file:
        file.truncate(8)
        block = mmap.mmap(file.fileno(), 8)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print(os.getpid(), name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    if reaper.group_pids(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def start(server_pid: int, prefix: str, scratch: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__, str(server_pid), prefix, str(scratch)])


@pytest.mark.parametrize("reaped_first", [False, True])
def test_a_dead_servers_stub_shared_memory_and_files_go(
    server: subprocess.Popen[str], tmp_path: Path, reaped_first: bool
) -> None:
    assert server.stdout is not None
    number, own = server.stdout.readline().split()
    stub, own_block = int(number), reaper.SHARED_MEMORY / own
    prefix = f"triton_omni_test_{uuid.uuid4().hex[:12]}_"
    block, foreign = reaper.SHARED_MEMORY / f"{prefix}stub", reaper.SHARED_MEMORY / f"x{prefix}"
    scratch = tmp_path / "scratch"
    for path in (block, foreign, scratch / "backends" / "file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        if reaped_first:  # the server is gone before anybody looks
            server.kill()
            server.wait()
            process = start(server.pid, prefix, scratch)
        else:
            process = start(server.pid, prefix, scratch)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            assert sorted(reaper.group_pids(server.pid)) == sorted([server.pid, stub]) and block.exists()
            assert own_block.exists()
            server.kill()
        assert process.wait(60) == 0
        assert reaper.group_pids(server.pid) == []
        assert foreign.exists() and not block.exists() and not scratch.exists()
        assert not own_block.exists()
    finally:
        for path in (foreign, block, own_block):
            path.unlink(missing_ok=True)
