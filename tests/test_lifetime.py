"""A process that is to end with another one does."""

from __future__ import annotations

import subprocess
import sys

SLEEPER = "import time; time.sleep(60)"
FOLLOWER = "import sys, time; from triton_omni.lifetime import end_with; end_with(int(sys.argv[1])); time.sleep(60)"


def test_ends_when_the_other_is_killed() -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    follower = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(other.pid)])
    other.kill()
    other.wait()
    assert follower.wait(10) == 1


def test_ends_at_once_when_the_other_is_gone() -> None:
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    assert subprocess.Popen([sys.executable, "-c", FOLLOWER, str(other.pid)]).wait(10) == 1
