"""Errors on their way through Triton's one string."""

from __future__ import annotations

import pytest

from triton_omni.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequestError,
    NotFoundError,
    OmniError,
    RequestCancelledError,
    RequestTimeoutError,
    StageError,
    from_wire,
)

ERRORS = [
    InvalidRequestError("thinker.temperature", "must lie in [0, 2], got 3"),
    InvalidRequestError("messages[0].content[1].media", "is no audio: [Errno 5] bad data"),
    InvalidRequestError("messages[0].content[1]", "is no image"),
    NotFoundError("speaker", "nobody"),
    StageError("talker", "broken: [really]: yes"),
    OmniError("what [is]: this"),
    CapacityError("full"),
    RequestCancelledError("left"),
    RequestTimeoutError("late", field="omni_bls"),
    CheckpointError("no tensor"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.to_wire())
@pytest.mark.parametrize("around", ["{}", "in ensemble 'omni', Failed to process the request: {}"])
def test_an_error_survives_the_wire(error: OmniError, around: str):
    copy = from_wire(around.format(error.to_wire()), stage="omni_bls")
    assert type(copy) is type(error)
    assert (copy.field, copy.message) == (error.field, error.message)


def test_the_message_becomes_one_line():
    assert from_wire(OmniError("two\n  lines").to_wire(), stage="x").message == "two lines"


def test_anything_else_is_an_error_of_the_stage():
    error = from_wire("Segmentation fault", stage="talker")
    assert isinstance(error, StageError)
    assert (error.field, error.message) == ("talker", "Segmentation fault")
