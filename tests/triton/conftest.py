"""Lets the tests import what only a server's stub can otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.triton import fake_pb_utils
from tests.triton.client import TritonCall
from triton_omni.triton.wakeups import WakeupReader

sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)


@pytest.fixture(autouse=True)
def no_call_stays_open() -> Iterator[None]:
    """What one test leaves open, one that has failed above all, would be in the next one's way."""
    yield
    for call in [*TritonCall.open_calls]:
        call.cancel()


@pytest.fixture
def reader() -> Iterator[WakeupReader]:
    """An omni_bls that hears what is sent to it."""
    reader = WakeupReader()
    yield reader
    reader.close()
