"""Even workers: one thread accepts every connection and hands it to the worker that has the fewest open.

Where workers accept for themselves on one socket, who is awake takes what waits: of 16 connections opened at once one
of four workers got up to 15, and a client keeps its connections (docs/performance/frontend.md). SO_REUSEPORT goes by a
hash, and resets what waits for a worker that died.

A worker joins with an end of a socket pair, its channel (``worker_loop.py``). Connections go over it as file
descriptors; ``TAKEN`` and ``CLOSED``, a byte each, come back. One that is to end says ``DRAINS`` and takes nothing more
until it has its answer: the end of the channel, where others get what it has not taken and all that comes; ``GO_ON``,
where there is no other, and somebody has to tell clients that this server ends.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from functools import partial
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

TAKEN, CLOSED, DRAINS = b"t", b"c", b"d"
CONNECTION, GO_ON = b"\0", b"g"
# That a worker was handed and has not taken: one that hangs gets no more.
MOST_WAITING = 16
_BACKLOG = 2048
# Where this process or the machine has no descriptor left for another connection.
_RETRY_S = 1.0
_READ_BYTES = 4096


class _Worker:
    """``open``: connections that it has, those ``waiting`` included, which are kept here until it takes them.
    ``drains``: it is to end.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.open = 0
        self.waiting: deque[socket.socket] = deque()
        self.drains = False
        self._goes_on = False

    def hand(self, connection: socket.socket) -> None:
        """Raises: OSError when it is gone."""
        socket.send_fds(self.channel, [CONNECTION], [connection.fileno()])
        self.waiting.append(connection)
        self.open += 1

    def read(self) -> bool:
        """What it tells; False when it is gone."""
        try:
            told = self.channel.recv(_READ_BYTES)
        except ConnectionError:
            return False
        for _ in range(told.count(TAKEN)):
            self.waiting.popleft().close()
        self.open -= told.count(CLOSED)
        self.drains = self.drains or DRAINS in told
        return bool(told)

    def go_on(self) -> None:
        """Say once that nobody takes its place."""
        if not self._goes_on:
            self._goes_on = True
            with contextlib.suppress(OSError):  # it is gone, which is heard next
                self.channel.send(GO_ON)


class Acceptor:
    """Accepts on ``listener``, which is bound; workers join through ``door``. It listens from the first of them on, and
    accepts only while one has room: else connections wait in the kernel. A context manager, whose thread runs while it
    is entered. ``ending``: all workers are to end, so none takes another's place.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._joining, self.door = socket.socketpair()
        self._workers: list[_Worker] = []  # who was handed one last is last
        self._unplaced: deque[socket.socket] = deque()
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self.ending = False
        self._stopping = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="acceptor")

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        self._selector.register(self._joining, selectors.EVENT_READ, self._join)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._waker.send(b"\0")
        self._thread.join()
        channels = [worker.channel for worker in self._workers]
        waiting = [connection for worker in self._workers for connection in worker.waiting]
        for each in (*channels, *waiting, *self._unplaced, self._listener, self._joining, self.door):
            each.close()
        for end in (self._waker, self._woken, self._selector):
            end.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select():
                key.data()
            self._place()

    def _join(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._joining, 1, 1)
        if not descriptors:
            logger.error("a worker cannot join: this process has no descriptor left for it")
            return
        worker = _Worker(socket.socket(fileno=descriptors[0]))
        self._workers.append(worker)
        self._listener.listen(_BACKLOG)
        self._selector.register(worker.channel, selectors.EVENT_READ, partial(self._hear, worker))

    def _hear(self, worker: _Worker) -> None:
        if not worker.read():
            self._leave(worker)
        elif worker.drains:
            if self.ending or all(each.drains for each in self._workers):
                worker.go_on()
            else:
                self._leave(worker)

    def _leave(self, worker: _Worker) -> None:
        """What it has not taken is another's."""
        self._selector.unregister(worker.channel)
        with contextlib.suppress(OSError):
            worker.channel.shutdown(socket.SHUT_RDWR)
        while worker.read():  # what it told before
            pass
        worker.channel.close()
        self._workers.remove(worker)
        self._unplaced += worker.waiting

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.error("a connection cannot be accepted: %s", error)
            self._stopping.wait(_RETRY_S)
            return
        self._unplaced.append(connection)

    def _place(self) -> None:
        while (free := self._free()) and self._unplaced:
            worker = min(free, key=lambda each: each.open)
            try:
                worker.hand(self._unplaced[0])
            except OSError as error:
                logger.warning("a worker takes no more connections: %s", error)
                self._leave(worker)
                continue
            self._unplaced.popleft()
            self._workers.remove(worker)
            self._workers.append(worker)
        if bool(free) == self._accepting:
            return
        self._accepting = bool(free)
        if self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        else:
            self._selector.unregister(self._listener)

    def _free(self) -> list[_Worker]:
        staying = [worker for worker in self._workers if not worker.drains]
        return [worker for worker in staying or self._workers if len(worker.waiting) < MOST_WAITING]
