"""A process that is to end with another one does, and who waits for an end is told."""

from __future__ import annotations

import os
import queue
import subprocess
import sys

from triton_omni.lifetime import when_gone

FORKED = """
import multiprocessing, threading, time
from triton_omni.lifetime import end_with_starter
def run():
    before = threading.active_count()
    end_with_starter()
    end_with_starter()
    print(threading.active_count() - before, "watches", flush=True)
    time.sleep(600)
end_with_starter()  # nobody's child: nothing happens
multiprocessing.get_context("fork").Process(target=run).start()
time.sleep(600)
"""
SLEEPER = "import time; time.sleep(600)"
FOLLOWER = "import sys, time; from triton_omni.lifetime import end_with; end_with(int(sys.argv[1])); time.sleep(600)"


def test_ends_when_the_other_is_killed() -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    follower = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(other.pid)])
    other.kill()
    other.wait()
    assert follower.wait(120) == 1


def test_ends_at_once_when_the_other_is_gone() -> None:
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    assert subprocess.Popen([sys.executable, "-c", FOLLOWER, str(other.pid)]).wait(120) == 1


def test_a_forked_process_ends_with_the_one_that_started_it() -> None:
    starter = subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "1 watches\n", "it was asked twice"
    starter.kill()
    starter.wait()
    assert starter.stdout.read() == "", "which ends when the forked process has ended, too"
    starter.stdout.close()


def test_an_end_is_told_once_whether_it_is_to_come_or_has_been() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    when_gone(other.pid, lambda: told.put("while it ran"))
    assert told.empty()
    other.kill()
    assert told.get(timeout=60) == "while it ran"
    other.wait()
    when_gone(other.pid, lambda: told.put(f"from {os.getpid()}"))
    assert told.get(timeout=60) == f"from {os.getpid()}"
    assert told.empty()
