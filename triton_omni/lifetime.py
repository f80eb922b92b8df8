"""Processes whose end is somebody's concern."""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import threading
from collections.abc import Callable


def end_with(pid: int) -> None:
    """End this process at once, without any clean-up, when the process ``pid`` is gone; now, if it is gone already."""
    when_gone(pid, lambda: os._exit(1))


def end_with_starter() -> None:
    """End this process when the one is gone that started it with multiprocessing; may be called again and again."""
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None:
        _end_once_with(os.getpid(), starter.pid)


@functools.cache
def _end_once_with(own_pid: int, pid: int) -> None:
    """``own_pid``: a forked process has the cache of the one it was forked from."""
    end_with(pid)


def when_gone(pid: int, call: Callable[[], None]) -> None:
    """Make one call when the process ``pid`` is gone, from a thread of its own; now, if it is gone already."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        call()
        return
    threading.Thread(target=_wait, args=(process, call), name=f"watch-{pid}", daemon=True).start()


def _wait(process: int, call: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    os.close(process)
    call()
