"""A cancel key finds its request in whichever omni_bls has it, before it comes, and not for ever."""

from __future__ import annotations

import itertools
import threading
import uuid
from types import SimpleNamespace

import pytest

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.events import CancelToken
from triton_omni.triton import cancel_keys
from triton_omni.triton.cancel_keys import CancelKeys
from triton_omni.triton.wakeups import WakeupReader

WAIT_S = 60  # for what comes at once


class Token:
    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.cancel = self.cancelled.set


def test_a_cancel_key_finds_its_request_in_another_instance(reader: WakeupReader) -> None:
    other = WakeupReader()
    here, there, token, key = CancelKeys(reader), CancelKeys(other), Token(), uuid.uuid4().hex
    there.add(key, token)
    here.cancel(uuid.uuid4().hex)
    assert not token.cancelled.wait(0.05)
    here.cancel(key)
    assert token.cancelled.wait(WAIT_S)
    other.close()


def test_a_cancel_that_overtakes_its_request_in_another_instance_ends_it(
    reader: WakeupReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_keys, "time", SimpleNamespace(monotonic=lambda: 0.0))
    other, told, key = WakeupReader(), threading.Event(), uuid.uuid4().hex
    here, there, token = CancelKeys(reader), CancelKeys(other), CancelToken()
    remember = other.on_cancel
    other.on_cancel = lambda digest: (remember(digest), told.set())
    here.cancel(key)
    assert told.wait(WAIT_S)
    there.add(key, token)
    assert token.cancelled
    other.close()


def test_an_early_cancel_is_not_remembered_for_ever(reader: WakeupReader, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = itertools.count(0, cancel_keys.EARLY_S)
    monkeypatch.setattr(cancel_keys, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    monkeypatch.setattr(cancel_keys, "broadcast", lambda *_: None)
    keys, token = CancelKeys(reader), CancelToken()
    keys.cancel("key")
    keys.add("key", token)
    assert not token.cancelled


def test_only_so_many_early_cancels_are_remembered(reader: WakeupReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_keys, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(cancel_keys, "broadcast", lambda *_: None)
    monkeypatch.setattr(cancel_keys, "_MAX_EARLY", 2)
    keys = CancelKeys(reader)
    for key in "abc":
        keys.cancel(key)
    for key, is_remembered in {"a": False, "b": True, "c": True}.items():
        keys.add(key, token := CancelToken())
        assert token.cancelled == is_remembered


def test_a_cancel_key_is_forgotten_with_its_request(reader: WakeupReader) -> None:
    keys, token = CancelKeys(reader), Token()
    keys.add("key", token)
    with pytest.raises(InvalidRequestError, match="names another open request"):
        keys.add("key", Token())
    keys.discard("key")
    keys.cancel("key")
    assert not token.cancelled.is_set()
    keys.add("", Token())
    keys.add("", Token())
