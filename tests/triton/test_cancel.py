"""The client leaves: every stage gets its session back."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator

import pytest
from tritonclient.utils import InferenceServerException

from tests.servers import READY_TIMEOUT_S, MakeServer
from tests.triton.client import ENDLESS, HELLO, Answer, TritonCall, gauges, omni, open_sessions, speech, take_back
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton


def test_cancel_while_text_and_audio_stream(tight_server: TritonServer, eventually) -> None:
    call = omni(tight_server, speech(talker=ENDLESS))
    responses = iter(call)
    while not next(responses)["AUDIO"].size:
        pass
    call.cancel()
    eventually(lambda: open_sessions(tight_server))


def test_cancel_when_only_speech_is_left(tight_server: TritonServer, eventually) -> None:
    call = omni(tight_server, speech(talker=ENDLESS))
    responses = iter(call)
    seen = list(itertools.takewhile(lambda r: b"w19 " not in r["TEXT"].ravel()[0], responses))
    assert seen
    while not next(responses)["AUDIO"].size:
        pass
    eventually(lambda: gauges(tight_server)["thinker", "running"])
    eventually(lambda: gauges(tight_server)["talker", "running"] != 1)
    call.cancel()
    eventually(lambda: open_sessions(tight_server))


def test_cancel_reaches_those_who_wait_for_a_slot(tight_server: TritonServer, eventually) -> None:
    running = [omni(tight_server, speech(talker=ENDLESS)) for _ in range(4)]
    responses = [iter(call) for call in running]
    for each in responses:
        next(each)
    eventually(lambda: gauges(tight_server)["talker", "waiting"] != 2)
    calls = [*running, *(omni(tight_server, speech()) for _ in range(2))]
    eventually(lambda: gauges(tight_server)["omni_bls", "waiting"] != 2)
    for call in reversed(calls):
        call.cancel()
    eventually(lambda: open_sessions(tight_server))
    eventually(lambda: gauges(tight_server)["talker", "slots_free"] != 2)
    assert Answer(omni(tight_server, speech(talker={"max_frames": 5}))).audio.size == 5 * 1920 - 555


def test_cancel_of_a_stage_by_its_own_client(tight_server: TritonServer, eventually) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(2000)]  # a minute of calls
    call = TritonCall(tight_server, "thinker", {"REQUEST": [json.dumps({"messages": HELLO, "tools": tools})]})
    responses = iter(call)
    next(responses)
    eventually(lambda: gauges(tight_server)["thinker", "running"] != 1)
    call.cancel()
    eventually(lambda: open_sessions(tight_server))


def test_cancel_by_key_ends_the_stream_with_an_error(tight_server: TritonServer, eventually) -> None:
    responses = iter(omni(tight_server, speech(talker=ENDLESS), cancel_key="mine"))
    next(responses)
    take_back(tight_server, "mine")
    with pytest.raises(InferenceServerException, match=r"^cancelled: "):
        list(responses)
    eventually(lambda: open_sessions(tight_server))
    take_back(tight_server, "mine")


def test_a_key_names_one_open_request(tight_server: TritonServer) -> None:
    responses = iter(omni(tight_server, speech(talker=ENDLESS), cancel_key="taken"))
    next(responses)
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[CANCEL_KEY\]: names another open request"):
        list(omni(tight_server, speech(), cancel_key="taken"))
    take_back(tight_server, "taken")
    with pytest.raises(InferenceServerException, match=r"^cancelled: "):
        list(responses)
    again = omni(tight_server, speech(talker={"max_frames": 4}), cancel_key="taken")
    assert Answer(again).end["finish_reason"] == "length", "a key is free when its request has ended"


@pytest.fixture(scope="module")
def own_server(make_server: MakeServer) -> Iterator[TritonServer]:
    """For no other tests: tritonserver 24.10 dies now and then when a stream is cancelled while a response is on its
    way to a client that stands still.
    """
    fast = {"thinker": {"null_token_ms": "5", "null_prefill_ms": "2"}, "talker": {"null_frame_ms": "1"}}
    with make_server(fast, {}, null=True) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server


@pytest.mark.parametrize("how", ["the key", "the stream"])
def test_a_hundred_cancels_leak_nothing(own_server: TritonServer, eventually, how: str) -> None:
    """omni_bls has two instances here: a key must find its request in the other one too."""
    before = gauges(own_server)["omni_bls", "cancelled"]
    for count in range(100):
        key = str(uuid.uuid4())
        call = omni(own_server, speech(talker=ENDLESS), cancel_key=key)
        responses = iter(call)
        for _ in range(1 + count % 12):
            next(responses)
        if how == "the stream":
            call.cancel()
            continue
        take_back(own_server, key)
        with pytest.raises(InferenceServerException, match=r"^cancelled: "):
            list(responses)
    eventually(lambda: open_sessions(own_server))
    eventually(lambda: gauges(own_server)["omni_bls", "cancelled"] - before != 100)
    assert Answer(omni(own_server, speech())).end["finish_reason"] == "stop"
