from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pipeline.support import House


@pytest.fixture
def house() -> Iterator[Callable[..., House]]:
    """Makes Houses and closes them; every one must be empty by then."""
    houses: list[House] = []

    def make(*args: Any, **kwargs: Any) -> House:
        houses.append(House(*args, **kwargs))
        return houses[-1]

    yield make
    for one in houses:
        one.close()
