"""Which worker gets a connection. The workers are ends of socket pairs that the tests read when they like to."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from openai_frontend.acceptor import CLOSED, DRAINS, GO_ON, MOST_WAITING, TAKEN, Acceptor

TIMEOUT_S = 60


class Worker:
    """Joins at once, and takes connections when told to."""

    def __init__(self, door: socket.socket) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(TIMEOUT_S)
        with theirs:
            socket.send_fds(door, [b"\0"], [theirs.fileno()])
        self.connections: list[socket.socket] = []

    def receive(self, count: int) -> None:
        """Waits for ``count`` connections, and tells nobody of it."""
        for _ in range(count):
            _, (descriptor,), _, _ = socket.recv_fds(self.channel, 1, 1)
            self.connections.append(socket.socket(fileno=descriptor))

    def take(self, count: int) -> None:
        for _ in range(count):
            self.receive(1)
            self.channel.send(TAKEN)

    def has_more(self) -> bool:
        """Whether it was handed a connection that it has not received."""
        return bool(select.select([self.channel], [], [], 0)[0])

    def end(self) -> None:
        for each in (*self.connections, self.channel):
            each.close()


class Site:
    """An acceptor, its workers, and connections to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self.listener.getsockname()
        self.acceptor = Acceptor(self.listener)
        self.workers: list[Worker] = []
        self.clients: list[socket.socket] = []

    def join(self, count: int) -> list[Worker]:
        self.workers += (joined := [Worker(self.acceptor.door) for _ in range(count)])
        return joined

    def connect(self, count: int) -> None:
        self.clients += [socket.create_connection(self.address, TIMEOUT_S) for _ in range(count)]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.acceptor:
        yield site
        for worker in site.workers:
            worker.end()
    for client in site.clients:
        client.close()


def test_workers_that_hold_still_get_equally_many(site: Site):
    workers = site.join(4)
    site.connect(4 * MOST_WAITING)
    for worker in workers:
        worker.receive(MOST_WAITING)
    site.connect(1)
    assert not any(worker.has_more() for worker in workers)  # no room: it waits in the kernel


def test_all_that_come_at_once_are_spread_evenly(site: Site):
    """They wait before anybody is there, and one worker is fast."""
    site.connect(64)
    fast, *slow = site.join(4)
    fast.take(16)
    for worker in slow:
        worker.take(16)
    assert not any(worker.has_more() for worker in site.workers)


def test_who_has_fewest_gets_the_next(site: Site):
    one, other = site.join(2)
    site.connect(12)
    one.take(6)
    other.take(6)
    one.channel.send(CLOSED * 5)
    site.connect(5)
    one.take(5)
    assert not other.has_more()


def test_one_that_hangs_does_not_keep_others_from_theirs(site: Site):
    hanging, working = site.join(2)
    site.connect(4 * MOST_WAITING)
    working.take(3 * MOST_WAITING)
    hanging.receive(MOST_WAITING)


def test_what_a_dead_worker_had_not_taken_is_another_s(site: Site):
    dying, living = site.join(2)
    site.connect(10)
    living.take(5)
    dying.take(2)
    dying.receive(1)
    dying.end()
    living.take(3)
    for number, connection in enumerate(living.connections):
        connection.send(b"%d" % number)
    answers = [client.recv(1) for client in site.clients]
    assert sorted(filter(None, answers)) == [b"%d" % number for number in range(8)]
    assert answers.count(b"") == 2  # those it had taken are closed, none hangs


def test_what_no_worker_has_taken_waits_for_the_next(site: Site):
    (dying,) = site.join(1)
    site.connect(3)
    dying.receive(3)
    dying.end()
    site.connect(3)
    (next_one,) = site.join(1)
    next_one.take(6)


def test_the_end_closes_what_nobody_took():
    site = Site()
    with site.acceptor:
        (worker,) = site.join(1)
        site.connect(2)
        worker.receive(1)
        worker.end()
    for client in site.clients:
        with client, contextlib.suppress(ConnectionResetError):  # one that waited in the kernel
            assert client.recv(1) == b""


def test_what_one_that_drains_had_not_taken_is_another_s_and_so_is_all_that_comes(site: Site):
    draining, staying = site.join(2)
    site.connect(10)
    staying.take(5)
    draining.take(2)
    draining.receive(3)
    draining.channel.send(DRAINS)
    assert draining.channel.recv(1) == b""
    site.connect(3)
    staying.take(3 + 3)
    for number, connection in enumerate((*draining.connections[:2], *staying.connections)):
        connection.send(b"%d" % (number % 10))
    assert [len(client.recv(1)) for client in site.clients] == [1] * 13  # nobody hangs, none is closed


def test_where_all_drain_they_go_on(site: Site):
    workers = site.join(2)
    site.acceptor.ending = True
    for worker in workers:
        worker.channel.send(DRAINS)
        assert worker.channel.recv(1) == GO_ON
    site.connect(2)
    for worker in workers:
        worker.take(1)


def test_the_last_one_goes_on_until_another_joins(site: Site):
    (draining,) = site.join(1)
    draining.channel.send(DRAINS)
    assert draining.channel.recv(1) == GO_ON
    site.connect(1)
    draining.take(1)
    (joined,) = site.join(1)
    site.connect(1)
    joined.take(1)
    site.connect(2)
    joined.take(2)
    assert not draining.has_more()
