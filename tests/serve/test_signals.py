from __future__ import annotations

import signal

import pytest

from triton_omni.serve.signals import STOP_SIGNALS, StopRequested, StopSignals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_an_interruptible_wait(number: signal.Signals) -> None:
    with StopSignals() as signals, pytest.raises(StopRequested), signals.interruptible():
        signal.raise_signal(number)
        pytest.fail("the signal did not arise")


def test_a_signal_outside_waits_for_the_next_interruptible_section() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        reached = True
        with pytest.raises(StopRequested), signals.interruptible():
            reached = False
        assert reached


def test_further_signals_do_not_disturb_the_clean_up() -> None:
    with StopSignals() as signals:
        with pytest.raises(StopRequested), signals.interruptible():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before
