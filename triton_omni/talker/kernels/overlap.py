"""Programmatic dependent launch: a kernel starts while the last one drains."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel of the stream to be scheduled as soon as every program of this one runs."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Everything the kernels before this one wrote is visible afterwards; nothing they write may be read earlier."""
    if PDL:
        gdc_wait()
