"""The worker processes of a tensor-parallel thinker, which end together."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import torch

from triton_omni.lifetime import when_gone

GRACE_S = 1.0  # at a shutdown all end by themselves, one a little before the other; and a failed step is answered
_FAILED_STEP = "WorkerProc hit an exception."  # what vLLM's worker logs


def end_together(group: Any) -> None:
    """To be called by all workers of ``group``, a GroupCoordinator of vLLM's.

    A worker that has died, or whose step has failed, leaves the others waiting for its part of a sum, for good. Of a
    death vLLM tells nobody before it has killed them, after nine seconds; a failure anywhere but in the first worker
    it does not hear of at all, and gives the step five minutes.
    """
    if group.world_size == 1:
        return
    pids = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    pids[group.rank_in_group] = os.getpid()
    torch.distributed.all_reduce(pids, group=group.cpu_group)
    for pid in pids.tolist():
        if pid != os.getpid():
            when_gone(pid, _end)
    logging.getLogger("vllm").addHandler(_FailedSteps(logging.ERROR))


class _FailedSteps(logging.Handler):
    """Ends the worker that logs one."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == _FAILED_STEP:
            threading.Thread(target=_end, name="failed-step", daemon=True).start()


def _end() -> None:
    time.sleep(GRACE_S)
    os._exit(1)
