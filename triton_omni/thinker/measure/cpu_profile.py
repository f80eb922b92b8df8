"""Where the threads of this process spend their CPU time: a sampler that needs nothing but the interpreter."""

from __future__ import annotations

import collections
import sys
import threading
import time
from pathlib import Path
from types import FrameType

PERIOD_S = 0.005
_SHOWN = 40
_PACKAGES = "site-packages/"


class CpuProfile:
    """Each ``PERIOD_S`` the CPU time that a thread has used since the last look is booked on the functions it is in
    now. Threads that wait use none, and so count for none; C code counts for the function that called it.
    """

    def __init__(self) -> None:
        self._own: collections.Counter[tuple[str, str]] = collections.Counter()  # (thread, function) -> ns
        self._within: collections.Counter[tuple[str, str]] = collections.Counter()
        self._threads: collections.Counter[str] = collections.Counter()
        self._last_ns: dict[int, int] = {}
        self._own_ns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, path: Path, requests: int | None = None) -> None:
        """Writes the report; with ``requests`` also what each cost."""
        self._stop.set()
        self._thread.join()
        path.write_text(self.report(requests))

    def report(self, requests: int | None = None) -> str:
        """Threads by CPU time, then functions: own time, and time in them and all they call."""
        scale, unit = (1e6 * requests, "ms per request") if requests else (1e9, "s")
        lines = [f"CPU time, {unit}", "", "threads"]
        lines += [f"{ns / scale:10.4f}  {name}" for name, ns in self._threads.most_common()]
        lines.append(f"{self._own_ns / scale:10.4f}  (this profile)")
        for title, counter in (("own time", self._own), ("with all that is called", self._within)):
            lines += ["", title]
            lines += [
                f"{ns / scale:10.4f}  {function}  [{thread}]" for (thread, function), ns in counter.most_common(_SHOWN)
            ]
        return "\n".join(lines) + "\n"

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._sample()
            self._own_ns = time.thread_time_ns()

    def _sample(self) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.ident not in frames or thread.native_id is None or thread is self._thread:
                continue
            try:
                now_ns = time.clock_gettime_ns(_clock_id(thread.native_id))
            except OSError:  # it has ended
                continue
            spent_ns = now_ns - self._last_ns.get(thread.ident, now_ns)
            self._last_ns[thread.ident] = now_ns
            if spent_ns > 0:
                self._book(thread.name.rstrip("0123456789_-"), frames[thread.ident], spent_ns)

    def _book(self, thread: str, frame: FrameType | None, spent_ns: int) -> None:
        self._threads[thread] += spent_ns
        seen = set()
        own = True
        while frame is not None:
            code = frame.f_code
            function = f"{code.co_filename.rpartition(_PACKAGES)[2]}:{code.co_firstlineno} {code.co_name}"
            if own:
                self._own[thread, function] += spent_ns
                own = False
            if function not in seen:
                seen.add(function)
                self._within[thread, function] += spent_ns
            frame = frame.f_back


def _clock_id(native_id: int) -> int:
    """Linux's clock of the CPU time of one thread. pthread_getcpuclockid() would crash for one that has ended."""
    return (~native_id << 3) | 6
