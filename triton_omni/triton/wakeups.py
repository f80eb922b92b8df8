"""How omni_bls learns that a child's response has arrived, without waiting inside Triton's response iterator.

``next()`` on a response iterator must not wait. While it waits it lets go of the GIL, and when the response comes it
takes the GIL back *holding the iterator's lock*. The stub's thread that delivers responses may then stand before that
lock with the lock of all iterators in its hand, and a third thread, coming out of ``exec(decoupled=True)`` with the
GIL, before the lock of all iterators: nobody moves again, and with the stub the whole server stands still (seen with
server 2.51 at 64 streams within seconds; pb_stub.cc and pb_response_iterator.cc of 2025 still do this).

So a child writes a record into a named pipe after each ``send()``, which returns only when the response lies in the
iterator's buffer. omni_bls waits for the record, in Python, and takes the response with a ``next()`` that never waits.
Records between the responses say that the child lives. A stub that dies ends no stream, so each record names its
process too, whose end is watched.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import re
import select
import stat
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from triton_omni.errors import StageError

logger = logging.getLogger(__name__)

PARAMETER = "omni_wakeup"
"""The request parameter that asks a child for records: the pipe's number, ``:``, the stream's key."""
SILENCE_S = 30.0
# Stream, kind, the writer's process id; far below PIPE_BUF: writes of several processes do not mix.
_RECORD = struct.Struct("<16sBI")
_READ_BYTES = 1 << 16
_TARGET = re.compile(r"[0-9a-f]{32}:[0-9a-f]{32}")  # the pipe's number, the stream's key
_NO_READER = (errno.ENOENT, errno.ENXIO, errno.EPIPE)  # no pipe, or one that nobody has open, or has any more


class Record(enum.IntEnum):
    """What has happened to a stream."""

    ALIVE = 0
    RESPONSE = 1
    LAST_RESPONSE = 2
    CANCEL = 3  # from one omni_bls instance to the others, with the digest of a cancel key


class Arrivals:
    """The responses of one stream that have arrived; the first one comes with ``exec`` and needs no record. ``pid``: of
    the process that they come from, 0 until it is known.
    """

    def __init__(self, stage: str, parameter: str) -> None:
        self.parameter = parameter
        self.pid = 0
        self._stage = stage
        self._changed = threading.Condition()
        self._count = 0
        self._complete = False
        self._died = False
        self._heard_s = time.monotonic()

    def tell(self, record: Record) -> None:
        """Note a record of this stream."""
        with self._changed:
            self._heard_s = time.monotonic()
            if record is not Record.ALIVE:
                self._count += 1
                self._complete = record is Record.LAST_RESPONSE
                self._changed.notify()

    def tell_death(self) -> None:
        """The process has ended; what it had sent before has been told."""
        with self._changed:
            self._died = True
            self._changed.notify()

    def wait(self, number: int) -> bool:
        """Wait for response ``number`` (from 1). False: the stream has ended before it.

        Raises: StageError when the process has died, or nothing has been heard of the stream for SILENCE_S.
        """
        with self._changed:
            while self._count < number:
                if self._complete:
                    return False
                if self._died:
                    raise StageError(self._stage, "the process that served this request died")
                left_s = self._heard_s + SILENCE_S - time.monotonic()
                if left_s <= 0:
                    raise StageError(self._stage, f"nothing was heard of it for {SILENCE_S:g} s")
                self._changed.wait(left_s)
            return True


class WakeupReader:
    """omni_bls's end of the pipe, and the thread that reads it and watches the processes that write into it."""

    def __init__(self) -> None:
        self.on_cancel: Callable[[bytes], object] = lambda _: None
        self._number = uuid.uuid4().hex
        self._path = _path(self._number)
        os.mkfifo(self._path, mode=0o600)
        self._pipe = os.open(self._path, os.O_RDWR)  # open for writing too: children come and go
        self._lock = threading.Lock()
        self._streams: dict[bytes, Arrivals] = {}
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._writers: dict[int, int] = {}  # pidfd -> process id
        self._rest = b""
        self._thread = threading.Thread(target=self._run, name="omni-wakeups", daemon=True)
        self._thread.start()

    def open(self, stage: str) -> tuple[bytes, Arrivals]:
        """A new stream of ``stage``: its key, and its arrivals."""
        key = uuid.uuid4().bytes
        arrivals = Arrivals(stage, f"{self._number}:{key.hex()}")
        with self._lock:
            self._streams[key] = arrivals
        return key, arrivals

    def forget(self, key: bytes) -> None:
        """The stream has been read to its end."""
        with self._lock:
            self._streams.pop(key, None)

    def close(self) -> None:
        """End the thread and remove the pipe."""
        self._closed = True
        os.write(self._pipe, _RECORD.pack(bytes(16), Record.ALIVE, 0))
        self._thread.join()
        for descriptor in (self._pipe, *self._writers):
            os.close(descriptor)
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            dead = [descriptor for descriptor in ready if descriptor != self._pipe]
            # What a process wrote before its end counts, and lies in the pipe.
            while self._pipe in ready:
                self._read()
                ready = [descriptor for descriptor, _ in self._poll.poll(0)] if dead else []
            for descriptor in dead:
                self._bury(descriptor)

    def _read(self) -> None:
        data = self._rest + os.read(self._pipe, _READ_BYTES)
        whole = len(data) - len(data) % _RECORD.size
        self._rest = data[whole:]
        for key, kind, pid in _RECORD.iter_unpack(data[:whole]):
            if kind == Record.CANCEL:
                self.on_cancel(key)
                continue
            with self._lock:
                arrivals = self._streams.get(key)
            if arrivals is not None:
                arrivals.pid = pid
                self._watch(pid)
                arrivals.tell(Record(kind))

    def _watch(self, pid: int) -> None:
        if pid in self._writers.values():
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            descriptor = os.eventfd(1)  # readable at once, as that of a process that has ended
        self._writers[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)

    def _bury(self, descriptor: int) -> None:
        pid = self._writers.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with self._lock:
            lost = [arrivals for arrivals in self._streams.values() if arrivals.pid == pid]
        if lost:
            logger.warning("process %d ended, and %d response streams with it", pid, len(lost))
        for arrivals in lost:
            arrivals.tell_death()


class WakeupWriter:
    """A child's end of the pipes of all the omni_bls that call it; for one thread."""

    def __init__(self) -> None:
        self._pipes: dict[str, int] = {}
        self._pid = os.getpid()

    def write(self, target: str, record: Record) -> bool:
        """``target``: the request's parameter, which ``is_target``. False when the caller is gone."""
        number, _, key = target.partition(":")
        try:
            os.write(self._pipe(number), _RECORD.pack(bytes.fromhex(key), record, self._pid))
        except OSError as error:
            return self._failed(number, error)
        return True

    def is_read(self, target: str) -> bool:
        """False when the caller is gone."""
        number, _, _ = target.partition(":")
        poll = select.poll()
        try:
            poll.register(self._pipe(number), 0)
            if poll.poll(0):  # an error, which is told unasked
                raise BrokenPipeError(errno.EPIPE, "nobody reads the pipe")
        except OSError as error:
            return self._failed(number, error)
        return True

    def _pipe(self, number: str) -> int:
        if number not in self._pipes:
            self._pipes[number] = _open_to_write(_path(number))
        return self._pipes[number]

    def _failed(self, number: str, error: OSError) -> bool:
        logger.warning("no wakeup for %s: %s", number, error)
        if number in self._pipes:
            os.close(self._pipes.pop(number))
        return error.errno not in _NO_READER


def is_target(parameter: object) -> bool:
    """Whether a request's parameter is one of omni_bls's."""
    return isinstance(parameter, str) and _TARGET.fullmatch(parameter) is not None


def broadcast(key: bytes, record: Record) -> None:
    """To every omni_bls that shares the directory for temporary files."""
    for path in Path(tempfile.gettempdir()).glob("triton_omni_*.fifo"):
        with contextlib.suppress(OSError):  # the pipe of a process that was killed
            pipe = _open_to_write(path)
            try:
                os.write(pipe, _RECORD.pack(key, record, 0))
            finally:
                os.close(pipe)


def _path(number: str) -> Path:
    """The server's processes have one environment, so one directory for temporary files."""
    return Path(tempfile.gettempdir()) / f"triton_omni_{number}.fifo"


def _open_to_write(path: Path) -> int:
    # Without O_NONBLOCK, opening would wait for a reader that may be gone.
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
        os.close(pipe)
        raise OSError(f"{path} is no pipe")
    os.set_blocking(pipe, True)
    return pipe
