"""Processes whose end is somebody's concern."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


def end_with(pid: int) -> None:
    """End this process at once, without any clean-up, when the process ``pid`` is gone; now, if it is gone already."""
    when_gone(pid, lambda: os._exit(1))


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
