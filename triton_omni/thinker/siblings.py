"""Lets a request about another request find it in whichever replica of the thinker it runs.

Triton hands "rows" and "cancel" to any replica. One that does not know the request asks the others: each listens on a
Unix socket in the server's directory for temporary files. A question is one message, {"op", "request_id"}, the answer
another, with the rows in an anonymous memory file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from triton_omni.errors import NotFoundError, OmniError, StageError, from_wire
from triton_omni.pipeline.stages import PromptRows, ThinkerEngine
from triton_omni.pipeline.workers import Workers
from triton_omni.thinker.rows_channel import in_memory, mapped

logger = logging.getLogger(__name__)

STAGE = "thinker"
THREADS = 64  # an answer with rows waits for the prefill
_MESSAGE_BYTES = 1 << 16
_RETRY_S = 1.0  # no descriptor or no memory for a peer now; it waits in the socket's backlog
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group


class Siblings:
    """A replica's engine to the others, and theirs to it."""

    def __init__(self, engine: ThinkerEngine, rows_timeout_s: float) -> None:
        self._engine = engine
        self._rows_timeout_s = rows_timeout_s
        self._path = Path(tempfile.gettempdir()) / f"triton_omni_{STAGE}_{os.getpid()}.socket"
        self._path.unlink(missing_ok=True)  # of a process that had the same number and was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(self._path))
        self._socket.listen(THREADS)
        self._closing = threading.Event()
        self._workers = Workers("thinker-siblings", THREADS)
        self._thread = threading.Thread(target=self._listen, name="thinker-siblings", daemon=True)
        self._thread.start()

    def rows(self, request_id: str) -> PromptRows:
        """As ``ThinkerEngine.rows`` of the replica that has the request."""
        try:
            return self._engine.rows(request_id, self._rows_timeout_s)
        except NotFoundError as error:
            failure: OmniError = error
        for sibling in self._others():
            try:
                return _read_rows(*_ask(sibling, {"op": "rows", "request_id": request_id}))
            except NotFoundError:
                continue
            except OmniError as error:
                failure = error
        raise failure

    def abort(self, request_id: str) -> None:
        """End a request wherever it runs; the others are asked on a thread of their own."""
        self._engine.abort(request_id)
        for sibling in self._others():
            self._workers.submit(partial(_cancel, sibling, request_id))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._workers.close(timeout_s=0)

    def _others(self) -> Iterator[Path]:
        return (path for path in self._path.parent.glob(f"triton_omni_{STAGE}_*.socket") if path != self._path)

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if not self._closing.wait(_RETRY_S):
                    logger.warning("the other replicas of the thinker are not heard: %s", error)
                continue
            self._workers.submit(partial(self._answer, peer))

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            if not _is_ours(peer):
                return
            question = json.loads(peer.recv(_MESSAGE_BYTES))
            try:
                if question["op"] == "cancel":
                    self._engine.abort(question["request_id"])
                    _send(peer, {})
                else:
                    rows = self._engine.rows(question["request_id"], self._rows_timeout_s)
                    header = {"dtype": rows.dtype, "positions": list(rows.positions.shape)}
                    _send(peer, header, rows.positions.astype(np.int32, copy=False), rows.rows)
            except OmniError as error:
                _send(peer, {"error": error.to_wire()})


def _cancel(sibling: Path, request_id: str) -> None:
    with contextlib.suppress(OmniError):  # a replica that is gone runs nothing
        _ask(sibling, {"op": "cancel", "request_id": request_id})


def _ask(sibling: Path, question: dict[str, str]) -> tuple[dict[str, Any], list[int]]:
    """The answer's header and memory files. Raises the OmniError that it holds, NotFoundError if nobody is there."""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            peer.connect(str(sibling))
        except OSError:
            raise NotFoundError("request_id", f"{sibling} is no replica any more") from None
        if not _is_ours(peer):
            raise NotFoundError("request_id", f"{sibling} belongs to somebody else")
        try:
            peer.send(json.dumps(question).encode())
            message, memories, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES, 1)
        except OSError:
            message, memories = b"", []
    if not message:
        raise StageError(STAGE, "the process that served this request died")
    header: dict[str, Any] = json.loads(message)
    if "error" in header:
        raise from_wire(header["error"], stage=STAGE)
    return header, memories


def _send(peer: socket.socket, header: dict[str, Any], *arrays: np.ndarray[Any, Any]) -> None:
    memory = in_memory(*arrays)
    try:
        socket.send_fds(peer, [json.dumps(header).encode()], [memory] if arrays else [])
    finally:
        os.close(memory)


def _read_rows(header: dict[str, Any], memories: list[int]) -> PromptRows:
    content = mapped(memories[0])
    os.close(memories[0])
    positions = content[: 4 * int(np.prod(header["positions"]))].view(np.int32).reshape(header["positions"])
    return PromptRows(positions, content[positions.nbytes :], header["dtype"])


def _is_ours(peer: socket.socket) -> bool:
    """Whether the other end runs as this user: in a directory that is not the server's own, anybody can be there."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())
