"""Processes that must not outlive another one, however that ends."""

from __future__ import annotations

import os
import select
import threading


def end_with(pid: int) -> None:
    """End this process at once, without any clean-up, when the process ``pid`` is gone; now, if it is gone already."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait, args=(process,), name="end-with-parent", daemon=True).start()


def _wait(process: int) -> None:
    select.select([process], [], [])
    os._exit(1)
