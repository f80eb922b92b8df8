"""The client leaves: every stage gets its session back."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.triton.client import HELLO, Answer, TritonCall, gauges, omni, open_sessions, speech
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton

WITHIN_S = 2.0


def test_cancel_while_text_and_audio_stream(tight_server: TritonServer, eventually) -> None:
    call = omni(tight_server, speech())
    responses = iter(call)
    while not next(responses)["AUDIO"].size:
        pass
    call.cancel()
    eventually(lambda: open_sessions(tight_server), WITHIN_S)


def test_cancel_when_only_speech_is_left(tight_server: TritonServer, eventually) -> None:
    call = omni(tight_server, speech())
    responses = iter(call)
    seen = list(itertools.takewhile(lambda r: b"w19 " not in r["TEXT"].ravel()[0], responses))
    assert seen
    while not next(responses)["AUDIO"].size:
        pass
    eventually(lambda: gauges(tight_server)["thinker", "running"], WITHIN_S)
    assert gauges(tight_server)["talker", "running"] == 1
    call.cancel()
    eventually(lambda: open_sessions(tight_server), WITHIN_S)


def test_cancel_reaches_those_who_wait_for_a_slot(tight_server: TritonServer, eventually) -> None:
    running = [omni(tight_server, speech()) for _ in range(4)]
    responses = [iter(call) for call in running]
    for each in responses:
        next(each)
    eventually(lambda: gauges(tight_server)["talker", "waiting"] != 2, WITHIN_S)
    calls = [*running, *(omni(tight_server, speech()) for _ in range(2))]
    eventually(lambda: gauges(tight_server)["omni_bls", "waiting"] != 2, WITHIN_S)
    for call in reversed(calls):
        call.cancel()
    eventually(lambda: open_sessions(tight_server), WITHIN_S)
    assert gauges(tight_server)["talker", "slots_free"] == 2
    assert Answer(omni(tight_server, speech(talker={"max_frames": 5}))).audio.size == 5 * 1920 - 555


def test_cancel_of_a_stage_by_its_own_client(tight_server: TritonServer, eventually) -> None:
    call = TritonCall(tight_server, "thinker", {"REQUEST": [json.dumps({"messages": HELLO})]})
    responses = iter(call)
    next(responses)
    call.cancel()
    eventually(lambda: open_sessions(tight_server), WITHIN_S)


def test_two_hundred_cancels_leak_nothing(null_server: TritonServer, eventually) -> None:
    before = gauges(null_server)["omni_bls", "cancelled"]
    for count in range(200):
        call = omni(null_server, speech())
        responses = iter(call)
        for _ in range(1 + count % 12):
            next(responses)
        call.cancel()
    eventually(lambda: open_sessions(null_server), WITHIN_S)
    assert gauges(null_server)["omni_bls", "cancelled"] - before == 200
    assert Answer(omni(null_server, speech())).end["finish_reason"] == "stop"
