"""What every model's ``initialize`` leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from triton_omni.triton.parameters import initializer

ARGS = {"model_instance_name": "thinker_0_0"}


class Loaded:
    """Something that the garbage collector looks through."""


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_loaded_is_looked_through_no_more(thawed: None) -> None:
    model: dict[str, Any] = {}

    @initializer
    def initialize(model: Any, args: dict[str, str]) -> None:
        model["engine"] = Loaded()

    initialize(model, ARGS)
    assert gc.get_freeze_count() > 0
    assert not any(each is model["engine"] for each in gc.get_objects())
