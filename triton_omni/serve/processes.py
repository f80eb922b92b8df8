"""What the supervisor needs to know of processes: who runs below it, who ended first, which ports are taken."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import socket
import time
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Self

from triton_omni.errors import ConfigError

STUB = "triton_python_backend_stub"
_INSTANCE_WORD = 8  # of a stub's command line
# Before a command: it is asked to end when its parent ends, also when that was killed and could not clean up.
WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")
_FIRST_PORT = 16_000  # well-known servers listen below
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclasses.dataclass(frozen=True, slots=True)
class Watched:
    """A process whose end matters. ``model`` and ``instance`` are a stub's, as Triton calls them."""

    name: str
    pid: int
    model: str = dataclasses.field(default="", compare=False)
    instance: str = dataclasses.field(default="", compare=False)


def model_stubs(tritonserver_pid: int) -> list[Watched]:
    """The Python backend's stub processes, named after their models.

    A tritonserver goes on without a stub that died, and every request to that model then fails: so stubs are watched.
    """
    stubs = []
    for pid in child_pids(tritonserver_pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == STUB:
                model = Path(words[1]).parents[1].name  # of REPOSITORY/MODEL/VERSION/model.py
                instance = words[_INSTANCE_WORD] if len(words) > _INSTANCE_WORD else ""
                stubs.append(Watched(f"a process of the model {model!r}", pid, model, instance))
    return stubs


class LoadingStubs:
    """Notices a model whose stub has ended while it loads: tritonserver would wait for it for ever.

    Without a stub is also, for a moment, a model between the stub that completes its configuration and the one that
    runs it, and one that refused to load, about which tritonserver itself will say more: hence ``grace_s``. It says so
    when the model's other replicas have loaded, hence ``replica_grace_s``.
    """

    def __init__(
        self,
        tritonserver_pid: int,
        *,
        period_s: float = 1.0,
        grace_s: float = 15.0,
        replica_grace_s: float = 120.0,
        forgotten_grace_s: float = 20.0,
    ) -> None:
        self._pid = tritonserver_pid
        self._period_s, self._grace_s, self._replica_grace_s = period_s, grace_s, replica_grace_s
        self._forgotten_grace_s = forgotten_grace_s
        self._stubs: list[Watched] = []
        self._waiting_since_s: dict[str, float] = {}
        self._seen_at_s: dict[str, float] = {}
        self._replica_seen_at_s: dict[str, float] = {}
        self._looked_at_s = 0.0

    def lost(self) -> str | None:
        """What has been gone for longer than its grace. Looks once in ``period_s``: that walks all processes."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= self._period_s:
            self._looked_at_s = now_s
            self._stubs = model_stubs(self._pid)
            self._seen_at_s |= {stub.name: now_s for stub in self._stubs}
            # The stub that completes a configuration has the model's own name.
            replicas = [stub for stub in self._stubs if stub.instance not in ("", stub.model)]
            self._replica_seen_at_s |= {f"{stub.name} ({stub.instance})": now_s for stub in replicas}
        for seen_at_s, grace_s in (
            (self._seen_at_s, self._grace_s),
            (self._replica_seen_at_s, self._replica_grace_s),
        ):
            for name, seen_s in seen_at_s.items():
                if now_s - seen_s > grace_s:
                    return name
        return None

    def forgotten(self, initialized: Set[str], loaded: Set[str]) -> str | None:
        """A model whose every stub that ``lost`` saw is ``initialized`` and which tritonserver does not call ``loaded``
        for longer than its grace.
        """
        now_s = time.monotonic()
        left = {stub.name for stub in self._stubs if stub.instance not in initialized or stub.model in loaded}
        waiting = {stub.name for stub in self._stubs} - left
        self._waiting_since_s = {name: self._waiting_since_s.get(name, now_s) for name in waiting}
        for name, since_s in self._waiting_since_s.items():
            if now_s - since_s > self._forgotten_grace_s:
                return name
        return None


def child_pids(parent_pid: int) -> list[int]:
    """The running processes whose parent is ``parent_pid``."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command name, in parentheses, may hold spaces; the parent is the second field after it.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent_pid:
                    children.append(int(entry.name))
    return children


class Exits:
    """Waits for the first of some processes to end; each is left for its parent to reap. Any thread may ``add``."""

    def __init__(self, watched: Iterable[Watched] = ()) -> None:
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Watched] = {}
        for process in watched:
            self.add(process)

    def add(self, process: Watched) -> None:
        """Watch ``process``, too; one that has ended already is reported next."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            descriptor = os.eventfd(1)  # readable at once
        self._by_descriptor[descriptor] = process
        self._poll.register(descriptor, select.EPOLLIN)

    def wait(self) -> Watched:
        """Block until one has ended, and watch it no more."""
        (descriptor, _), *_ = self._poll.poll(maxevents=1)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._by_descriptor.pop(descriptor)

    def close(self) -> None:
        """Watch none any more."""
        for descriptor in self._by_descriptor:
            os.close(descriptor)
        self._by_descriptor.clear()
        self._poll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_ports(count: int) -> list[int]:
    """``count`` different TCP ports that are free on this machine at the moment. Not those that the system gives to
    whoever asks for any, an outgoing connection above all: a server may load for minutes before it listens.
    """
    try:
        given_from = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        given_from = 0
    candidates = range(_FIRST_PORT, given_from)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in (*random.sample(candidates, len(candidates)), *[0] * count):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("", port))
                found.append(sock.getsockname()[1])
            if len(found) == count:
                break
    return found


def host_for_clients(address: str) -> str:
    """How a URL names a server of this machine that listens on ``address``, which may be all of one kind."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{host}]" if ":" in host else host


def check_ports_free(ports: Sequence[tuple[str, str, int]]) -> None:
    """Each entry: option name, address, port. Raises ConfigError naming the first port that cannot be taken."""
    seen: dict[int, str] = {}
    for option, address, port in ports:
        if port in seen:
            raise ConfigError(f"{option} and {seen[port]} are both {port}: each needs a port of its own", field=option)
        seen[port] = option
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise ConfigError(f"{address} is no address of this machine: {error.strerror}", field=option) from None
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(target)
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise ConfigError(
                    f"port {port} on {address} cannot be taken ({reason}): stop what listens there, or choose "
                    f"another with {option}",
                    field=option,
                ) from None
