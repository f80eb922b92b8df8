"""Errors in the middle of a stream, on their way to omni_bls.

Triton 24.10 hands a BLS iterator an error as the first response only: a later one is lost, what comes with it too, and
``next()`` never returns. So a child that has begun to answer omni_bls ends with a response whose FINISH_REASON is
the error, and omni_bls makes an error of that again. Clients of the models themselves get Triton errors.
"""

from __future__ import annotations

from typing import Any

from triton_omni.errors import OmniError, from_wire
from triton_omni.triton.tensors import Arrays, read_string, string_tensor

_OUTPUT = "FINISH_REASON"
_PREFIX = "error: "


def late_error_tensors(error: OmniError) -> list[Any]:
    """The response that stands for ``error``."""
    return [string_tensor(_OUTPUT, _PREFIX + error.to_wire())]


def raise_late_error(stage: str, outputs: Arrays) -> None:
    """Raises the error that a response of ``stage`` stands for, if it stands for one."""
    if _OUTPUT in outputs:
        reason = read_string(outputs, _OUTPUT)
        if reason.startswith(_PREFIX):
            raise from_wire(reason.removeprefix(_PREFIX), stage=stage)
