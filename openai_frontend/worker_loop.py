"""The event loop of a worker, whose server is handed its connections by an ``Acceptor`` instead of accepting itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from openai_frontend.acceptor import CLOSED, DRAINS, GO_ON, TAKEN

if TYPE_CHECKING:
    from asyncio import SelectorEventLoop as _Loop
else:
    try:
        from uvloop import Loop as _Loop
    except ImportError:
        from asyncio import SelectorEventLoop as _Loop

logger = logging.getLogger(__name__)


class HandedConnections:
    """A server of what the acceptor behind ``door`` hands over; ``protocol_factory`` and ``ssl`` as in
    ``create_server``. An acceptor that goes first takes this process along: nobody could reach it any more.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol_factory: Callable[[], Any], door: socket.socket, ssl: Any = None
    ) -> None:
        self._loop, self._protocol_factory, self._ssl = loop, protocol_factory, ssl
        self._channel, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(door, [b"\0"], [theirs.fileno()])
        self._channel.setblocking(False)
        self._untold = b""
        self._relief: asyncio.Future[bool] | None = None
        self._held: list[int] = []  # until it is known who takes them
        self._starting: set[asyncio.Task[None]] = set()
        loop.add_reader(self._channel, self._take)

    def _take(self) -> None:
        """One, so that requests of those before it come in between."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        undecided = self._relief is not None and not self._relief.done()
        if not data:
            self.close()
            if not undecided:
                logger.warning("nobody accepts connections any more: this worker ends")
                signal.raise_signal(signal.SIGTERM)
        elif data == GO_ON:
            self._stay()
        elif undecided:
            self._held += descriptors
        else:
            self._begin(descriptors)

    def _begin(self, descriptors: Sequence[int]) -> None:
        self._tell(TAKEN)
        if not descriptors:
            logger.error("a connection is lost: this process has no descriptor left for it")
            self._tell(CLOSED)
            return
        connection = _Connection(fileno=descriptors[0])
        connection.ended = lambda: self._tell(CLOSED)
        task = self._loop.create_task(self._start(connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(self._protocol_factory, connection, ssl=self._ssl)
        except (OSError, TimeoutError) as error:  # a client that left, or does not speak TLS as expected
            logger.debug("a connection did not begin: %s", error)

    def _tell(self, message: bytes) -> None:
        """What cannot be told now is told with what comes next."""
        self._untold += message
        try:
            self._untold = self._untold[self._channel.send(self._untold) :]
        except OSError:
            return

    def hand_over(self) -> asyncio.Future[bool]:
        """Ask to be handed no more. True: other workers have what this one had not taken, and all that comes. False:
        there are none, it goes on.
        """
        if self._relief is None:
            self._relief = self._loop.create_future()
            if self._channel.fileno() == -1:
                self._relief.set_result(True)
            else:
                self._tell(DRAINS)
        return self._relief

    def _stay(self) -> None:
        held, self._held = self._held, []
        for descriptor in held:
            self._begin([descriptor])
        if self._relief is not None and not self._relief.done():
            self._relief.set_result(False)

    def close(self) -> None:
        """Take no more; those that have begun go on."""
        if self._channel.fileno() != -1:
            self._loop.remove_reader(self._channel)
            self._channel.close()
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()
        if self._relief is not None and not self._relief.done():
            self._relief.set_result(True)

    async def wait_closed(self) -> None:
        """At once."""


class _Connection(socket.socket):
    """Calls ``ended`` when its loop lets it go: asyncio closes it, uvloop detaches it and closes the descriptor."""

    ended: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        self._end()

    def detach(self) -> int:
        descriptor = super().detach()
        self._end()
        return descriptor

    def _end(self) -> None:
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()


class WorkerLoop(_Loop):
    """uvloop's where it is installed, else asyncio's. Its server on an acceptor's door, a Unix socket, is one of
    connections that are handed over.
    """

    _handed: HandedConnections | None = None

    async def hand_over(self) -> bool:
        """Ask to be handed no more connections; whether other workers have them now."""
        return self._handed is not None and await asyncio.shield(self._handed.hand_over())

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        sock = options.get("sock")
        if sock is None or sock.family != socket.AF_UNIX:
            return await super().create_server(protocol_factory, *args, **options)
        self._handed = HandedConnections(self, protocol_factory, sock, options.get("ssl"))
        return self._handed
