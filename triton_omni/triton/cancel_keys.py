"""Taking a request back by name: the way to cancel that asks nothing of Triton.

A client that cancels its gRPC stream is noticed (the responder polls), but servers before 25.04 may corrupt their
memory when that happens while a response is being written. A client that names its request with CANCEL_KEY can send the
key again, with an empty REQUEST, and read its stream to the regular end instead.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.events import CancelToken
from triton_omni.triton.wakeups import Record, WakeupReader, broadcast

EARLY_S = 5.0
"""How long a cancel waits for its request, which it may overtake on the way to another instance. As long as the
frontend waits before it cancels the stream instead.
"""
_MAX_EARLY = 4096


class CancelKeys:
    """The keys of an omni_bls instance's open requests. A key that is not here is passed on to the other instances, and
    remembered for EARLY_S: a request that comes with it then is cancelled at once. So each request takes a new key.
    """

    def __init__(self, wakeups: WakeupReader) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[bytes, CancelToken] = {}
        self._early: OrderedDict[bytes, float] = OrderedDict()  # digest -> when it was told, the oldest first
        wakeups.on_cancel = self._cancel

    def add(self, key: str, token: CancelToken) -> None:
        """Name a request; an empty key names nothing. Raises InvalidRequestError when the key is taken."""
        if not key:
            return
        digest = _digest(key)
        with self._lock:
            if self._tokens.setdefault(digest, token) is not token:
                raise InvalidRequestError("CANCEL_KEY", "names another open request already; take a new uuid for each")
            told_s = self._early.pop(digest, None)
        if told_s is not None and time.monotonic() - told_s < EARLY_S:
            token.cancel()

    def discard(self, key: str) -> None:
        """The request has ended."""
        with self._lock:
            self._tokens.pop(_digest(key), None)

    def cancel(self, key: str) -> None:
        """End the request of that name, in whichever instance it runs; an unknown one may be yet to come."""
        if not self._cancel(_digest(key)):
            broadcast(_digest(key), Record.CANCEL)

    def _cancel(self, digest: bytes) -> bool:
        with self._lock:
            token = self._tokens.get(digest)
            if token is None:
                self._remember(digest)
        if token is not None:
            token.cancel()
        return token is not None

    def _remember(self, digest: bytes) -> None:
        now_s = time.monotonic()
        self._early[digest] = now_s
        self._early.move_to_end(digest)
        while len(self._early) > _MAX_EARLY or now_s - next(iter(self._early.values())) >= EARLY_S:
            self._early.popitem(last=False)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
