"""When a device counts as lost."""

from __future__ import annotations

import pytest
import torch

from triton_omni.device import is_lost


def test_a_cpu_is_never_lost() -> None:
    assert not is_lost(torch.device("cpu"))


@pytest.mark.parametrize(("failures", "lost"), [(0, False), (1, False), (2, True)])
def test_a_gpu_is_lost_when_it_goes_on_failing(monkeypatch: pytest.MonkeyPatch, failures: int, lost: bool) -> None:
    left = iter(range(failures))

    def synchronize(device: torch.device) -> None:
        if next(left, None) is not None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_lost(torch.device("cuda:0")) is lost
