from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from triton_omni.errors import CapacityError, StageError
from triton_omni.triton.dead_replicas import OPENING_ATTEMPTS, DeadReplicaError, Sequences, opened
from triton_omni.triton.wakeups import Record, WakeupReader, WakeupWriter

DEAD = DeadReplicaError("talker", "the process died")


def attempts(*outcomes: Exception | str) -> Iterator[Exception | str]:
    return iter(outcomes)


def test_a_dead_replica_is_followed_by_another_attempt() -> None:
    sequences, outcomes, ids = Sequences(), attempts(DEAD, DEAD, "open"), []

    def attempt(number: int) -> str:
        ids.append(sequences.rename("s", number))
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert opened("talker", attempt) == "open"
    assert ids == ["s", "s~1", "s~2"]
    assert sequences.of("s") == "s~2", "what follows goes to the sequence that was opened"
    sequences.end("s")
    assert sequences.of("s") == "s"


def test_only_so_many_attempts_are_made() -> None:
    numbers = []

    def attempt(number: int) -> str:
        numbers.append(number)
        raise DEAD

    with pytest.raises(DeadReplicaError):
        opened("talker", attempt)
    assert numbers == list(range(OPENING_ATTEMPTS))


def test_other_errors_are_the_requests_own() -> None:
    numbers = []

    def attempt(number: int) -> str:
        numbers.append(number)
        raise CapacityError("full")

    with pytest.raises(CapacityError):
        opened("talker", attempt)
    assert numbers == [0]


def test_a_process_that_dies_ends_its_streams_and_no_others() -> None:
    """What it had sent before counts."""
    reader = WakeupReader()
    try:
        (_, lost), (_, other) = reader.open("talker"), reader.open("talker")
        code = (
            "import sys; from triton_omni.triton.wakeups import *; "
            "WakeupWriter().write(sys.argv[1], Record.RESPONSE); WakeupWriter().write(sys.argv[1], Record.RESPONSE)"
        )
        WakeupWriter().write(other.parameter, Record.RESPONSE)
        subprocess.run([sys.executable, "-c", code, lost.parameter], check=True)
        assert lost.wait(2)
        with pytest.raises(StageError, match="the process that served this request died"):
            lost.wait(3)
        WakeupWriter().write(other.parameter, Record.LAST_RESPONSE)
        assert other.wait(2)
        assert not other.wait(3)
    finally:
        reader.close()
