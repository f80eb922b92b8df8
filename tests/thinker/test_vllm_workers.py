"""Workers of a tensor-parallel thinker end together."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_omni.thinker.vllm_workers import end_together

WAIT_S = 240


def be_a_worker(rank: int, store: Path, ready: Any, fail: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world: Any = torch.distributed.group.WORLD
    end_together(types.SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=world))
    ready.release()
    fail.acquire()
    logging.getLogger("vllm.worker").error("WorkerProc hit an exception.")
    threading.Event().wait()


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_worker_does_not_outlive_one_that(how: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, fail = context.Semaphore(0), context.Semaphore(0)
    arguments = [(rank, tmp_path / "store", ready, fail) for rank in range(2)]
    workers = [context.Process(target=be_a_worker, args=each) for each in arguments]
    for worker in workers:
        worker.start()
    try:
        assert all(ready.acquire(timeout=WAIT_S) for _ in workers)
        if how == "dies":
            workers[1].kill()
        else:
            fail.release()  # whichever takes it
        for worker in workers:
            worker.join(WAIT_S)
        assert {worker.exitcode for worker in workers} == ({1, -signal.SIGKILL} if how == "dies" else {1})
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
