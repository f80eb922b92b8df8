"""A request that meets an instance whose process is gone is opened again, on another one.

Triton goes on handing requests to an instance whose process has died, until the instance is taken out. Each such
request fails after a second, with Triton's words.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from triton_omni.errors import StageError

logger = logging.getLogger(__name__)

OPENING_ATTEMPTS = 4
T = TypeVar("T")


class DeadReplicaError(StageError):
    """Triton has handed the request to an instance whose process is gone."""


def opened(stage: str, attempt: Callable[[int], T]) -> T:
    """``attempt(0)``, and the next one when it meets a dead replica: a process that is gone keeps nothing of it.

    A Triton sequence must be another one each time. One that was refused keeps its place in the dead instance, and
    Triton, which fills the instance with the lowest free place first, turns to the others.
    """
    for number in range(OPENING_ATTEMPTS - 1):
        try:
            return attempt(number)
        except DeadReplicaError as error:
            logger.warning("%s: %s; the request is sent again", stage, error.message)
    return attempt(OPENING_ATTEMPTS - 1)


class Sequences:
    """The correlation ids of sessions that could not be opened under their own id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renamed: dict[str, str] = {}

    def rename(self, session_id: str, number: int) -> str:
        """The id for the ``number``-th attempt to open a session."""
        if number:
            with self._lock:
                self._renamed[session_id] = f"{session_id}~{number}"
        return self.of(session_id)

    def of(self, session_id: str) -> str:
        with self._lock:
            return self._renamed.get(session_id, session_id)

    def end(self, session_id: str) -> None:
        """The session has ended, or could not be opened at all."""
        with self._lock:
            self._renamed.pop(session_id, None)
