"""Threads for one role of the pipeline."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Workers:
    """Up to ``size`` daemon threads, made when they are first needed, that run tasks in order of arrival.

    One pool per role: a pool whose tasks wait for further tasks of the same pool starves. Daemons, because a thread
    that hangs in a dead stage must not keep the process from ending (ThreadPoolExecutor's would).
    """

    def __init__(self, role: str, size: int) -> None:
        self._role = role
        self._size = size
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` on the next free thread."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._role} threads are closed")
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._size):
                name = f"omni-{self._role}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._tasks.put(task)

    def close(self, timeout_s: float) -> None:
        """End the threads; those that still hang after ``timeout_s`` are left to the end of the process."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("a task of the %s threads failed", self._role)
            del task
            with self._lock:
                self._unfinished -= 1
