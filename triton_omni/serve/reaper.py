"""Removes what a tritonserver leaves behind: ``python reaper.py PID SHM_PREFIX SCRATCH``.

PID leads a process group of its own; its shared memory is /dev/shm/SHM_PREFIX*, its temporary files are in SCRATCH.

A stub notices by itself that its server is gone. But when the server dies while the stub reports a finished command
(the end of its loading, say), one of the stub's threads waits for the server with Python's lock in hand and another
for that lock: nothing inside the process can end it any more. So a process outside waits for the server's end, however
that comes, also after the one that started both was killed. It imports nothing of the project: it must start in no
time and stay small.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PYTHONS_OWN = ("psm_", "sem.mp-")  # names that multiprocessing gives, as vLLM's processes use it
GRACE_S = 2.0  # in which whoever can end by itself does, and takes what it holds along
EXIT_TIMEOUT_S = 30.0  # a killed process with a GPU takes seconds to give its memory back


def reap(server_pid: int, shm_prefix: str, scratch: Path, *, grace_s: float = GRACE_S) -> None:
    """Wait for the end of ``server_pid`` and for ``grace_s`` for its process group's; kill that, wait until it is gone,
    and remove its files.
    """
    with contextlib.suppress(ProcessLookupError):
        _wait(server_pid)
    members = group_pids(server_pid)
    blocks = {block for pid in members for block in _mapped_blocks(pid) if block.name.startswith(PYTHONS_OWN)}
    _wait_all(members, grace_s)
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while (members := group_pids(server_pid)) and time.monotonic() < deadline_s:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server_pid, signal.SIGKILL)
        _wait_all(members, deadline_s - time.monotonic())
    for block in (*blocks, *SHARED_MEMORY.glob(f"{shm_prefix}*")):
        block.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def group_pids(group: int) -> list[int]:
    """The processes of a process group, without those that have ended and only wait for their parent to notice."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the command name, in parentheses that may hold spaces: state, parent, process group.
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state not in "ZX":
                    members.append(int(entry.name))
    return members


def _mapped_blocks(pid: int) -> list[Path]:
    """The shared memory that a process uses."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return []
    # Address, permissions, offset, device, inode, and the path, if the memory has one.
    paths = (Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line)
    return [path for path in paths if path.parent == SHARED_MEMORY]


def _wait_all(pids: list[int], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _wait(pid, max(0.0, deadline_s - time.monotonic()))


def _wait(pid: int, timeout_s: float | None = None) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reap(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
