"""The worker processes of a tensor-parallel thinker, which end together."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from triton_omni.lifetime import when_gone

GRACE_S = 1.0  # at a shutdown all end by themselves, one a little before the other


def end_together(group: Any) -> None:
    """To be called by all workers of ``group``, a GroupCoordinator of vLLM's. One that has died leaves the others
    waiting for its part of a sum, for good: vLLM gives them nine seconds before it kills them, and tells nobody of the
    death before that.
    """
    if group.world_size == 1:
        return
    pids = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    pids[group.rank_in_group] = os.getpid()
    torch.distributed.all_reduce(pids, group=group.cpu_group)
    for pid in pids.tolist():
        if pid != os.getpid():
            when_gone(pid, _end)


def _end() -> None:
    time.sleep(GRACE_S)
    os._exit(1)
