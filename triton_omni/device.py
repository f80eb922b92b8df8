"""Accelerators after an error."""

from __future__ import annotations

import torch


def is_lost(device: torch.device) -> bool:
    """Whether nothing will run on ``device`` any more in this process: after an illegal access, say, a GPU refuses
    every later call, and only a new process can use it. A lack of memory, or a kernel that could not be launched,
    leaves it as it was.
    """
    if device.type != "cuda":
        return False
    for _ in range(2):  # the first call may tell of what is past
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            continue
        return False
    return True
