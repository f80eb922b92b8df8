"""Rows from the process that computes them to the one that asked, through shared memory.

Each message is an anonymous memory file handed over a Unix socket: nothing to name, nothing to clean up, and the
kernel frees it when the last reader lets go, whoever dies first.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)
_MAX_HEADER_BYTES = 4096

Bytes = npt.NDArray[np.uint8]
RowsSink = Callable[[str, Bytes, str], None]
"""(request id, bytes, dtype); called from the receiver's thread."""


class RowsSender:
    """The computing side. ``send`` may be called from one thread at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def send(self, request_id: str, rows: Bytes, dtype: str) -> None:
        """Raises OSError when nobody listens."""
        header = json.dumps([request_id, dtype]).encode()
        memory = in_memory(rows)
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, np.array([memory], np.int32).tobytes())
            self._socket.sendmsg([header], [rights], 0, self._address)
        finally:
            os.close(memory)

    def close(self) -> None:
        self._socket.close()


class RowsReceiver:
    """The asking side; listens from the start. ``address`` is what a RowsSender needs."""

    def __init__(self, sink: RowsSink) -> None:
        self._sink = sink
        self._folder = Path(tempfile.mkdtemp(prefix="omni-rows-"))  # for this user alone
        self.address = str(self._folder / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._run, name="thinker-rows", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(b"", self.address)
            self._thread.join()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while True:
            header, memories, _, _ = socket.recv_fds(self._socket, _MAX_HEADER_BYTES, 1)
            if not header:
                return
            try:
                request_id, dtype = json.loads(header)
                self._sink(request_id, mapped(memories[0]), dtype)
            except Exception:
                log.exception("rows that arrived cannot be used")
            finally:
                for memory in memories:
                    os.close(memory)


def in_memory(*arrays: npt.NDArray[Any]) -> int:
    """The descriptor of a new anonymous file with the bytes of ``arrays``, one after the other."""
    memory = os.memfd_create("omni-rows", os.MFD_CLOEXEC)
    with open(memory, "wb", closefd=False) as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
    return memory


def mapped(memory: int) -> Bytes:
    """uint8 [size]: the content of a file, read as it is used; the descriptor may be closed."""
    if not os.fstat(memory).st_size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(memory, 0, access=mmap.ACCESS_READ), np.uint8)
