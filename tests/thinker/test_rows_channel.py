"""Rows cross from one process to another whole, and leave nothing behind."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.thinker.support import TIMEOUT_S
from triton_omni.thinker.rows_channel import RowsReceiver, RowsSender

SEND = """
import sys, numpy as np
from triton_omni.thinker.rows_channel import RowsSender
sender = RowsSender(sys.argv[1])
for i in range(40):
    sender.send(f"r{i}", np.full(1 << 20, i, np.uint8), "bfloat16")
sender.send("empty", np.empty(0, np.uint8), "float32")
"""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_rows_of_another_process() -> None:
    got: queue.SimpleQueue[tuple[str, np.ndarray, str]] = queue.SimpleQueue()
    before = open_files()
    receiver = RowsReceiver(lambda *rows: got.put(rows))
    receiver.start()
    subprocess.run([sys.executable, "-c", SEND, receiver.address], check=True, timeout=TIMEOUT_S)
    arrived = [got.get(timeout=TIMEOUT_S) for _ in range(41)]
    for i, (name, rows, dtype) in enumerate(arrived[:40]):
        assert (name, dtype, rows.size) == (f"r{i}", "bfloat16", 1 << 20)
        assert (rows == i).all()
    assert arrived[40][0] == "empty" and arrived[40][1].size == 0
    folder = Path(receiver.address).parent
    receiver.close()
    assert not folder.exists()
    del arrived, rows
    assert open_files() <= before


def test_a_sink_that_fails_does_not_stop_the_rest() -> None:
    got: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(name: str, rows: np.ndarray, dtype: str) -> None:
        if name == "bad":
            raise ValueError(name)
        got.put(name)

    receiver = RowsReceiver(sink)
    receiver.start()
    sender = RowsSender(receiver.address)
    for name in ("bad", "good"):
        sender.send(name, np.ones(3, np.uint8), "float32")
    assert got.get(timeout=TIMEOUT_S) == "good"
    receiver.close()
    with pytest.raises(OSError):
        sender.send("late", np.ones(3, np.uint8), "float32")
    sender.close()
