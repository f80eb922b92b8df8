"""A stage that fails in the middle of an answer: its error reaches whoever asked, and nothing stays open."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.servers import READY_TIMEOUT_S, MakeServer
from tests.triton.client import HELLO, TritonCall, omni, open_sessions, speech
from tests.triton.fake_pb_utils import Sender, Tensor
from triton_omni.errors import InvalidRequestError, StageError
from triton_omni.triton.late_errors import raise_late_error
from triton_omni.triton.responder import Responder
from triton_omni.triton.wakeups import PARAMETER, WakeupReader

ERROR = StageError("thinker", "failed at token 3, as told")


class FromOmniBls(Sender):
    wakeup = ""

    def parameters(self):
        return json.dumps({PARAMETER: self.wakeup})


@pytest.mark.parametrize(
    ("sender", "begun", "late"),
    [(FromOmniBls(), False, False), (FromOmniBls(), True, True), (Sender(), False, False), (Sender(), True, False)],
)
def test_only_a_late_error_to_omni_bls_is_written_as_a_response(
    sender: Sender, begun: bool, late: bool, reader: WakeupReader
) -> None:
    if isinstance(sender, FromOmniBls):
        _, arrivals = reader.open("thinker")
        sender.wakeup = arrivals.parameter
    responder = Responder("test", poll_s=10)
    stream = responder.open(sender, lambda texts: [[Tensor("TEXT", [text])] for text in texts])
    if begun:
        stream.send("some")
    stream.fail(ERROR)
    responder.close()
    (last, final) = sender.sent[-1]
    assert final and len(sender.sent) == 1 + begun
    if not late:
        assert last.error == ERROR.to_wire()
        return
    assert last.error is None
    with pytest.raises(StageError) as raised:
        raise_late_error("thinker", last.tensors)
    assert raised.value.to_wire() == ERROR.to_wire()


def test_an_error_crosses_as_it_is_and_other_reasons_are_none() -> None:
    outputs = {"FINISH_REASON": np.array([b"error: invalid_request [messages]: too long"])}
    with pytest.raises(InvalidRequestError, match="too long") as raised:
        raise_late_error("thinker", outputs)
    assert raised.value.field == "messages"
    for reason in (b"", b"stop", b"length", b"cancelled"):
        raise_late_error("thinker", {"FINISH_REASON": np.array([reason])})
    raise_late_error("code2wav", {})


@pytest.mark.triton
def test_a_thinker_that_fails_in_the_middle(make_server: MakeServer, eventually) -> None:
    failing = {"thinker": {"null_token_ms": "5", "null_fail_at_token": "3"}}
    with make_server(failing, {"omni_bls": 1}, null=True) as server:
        server.wait_ready(READY_TIMEOUT_S)
        text = [omni(server, {"messages": HELLO, "modalities": ["text"]}) for _ in range(4)]
        direct = TritonCall(server, "thinker", {"REQUEST": [json.dumps({"messages": HELLO})]})
        for call in (*text, omni(server, speech()), direct):
            with pytest.raises(InferenceServerException) as raised:
                list(call)
            assert raised.value.message() == ERROR.to_wire()
        eventually(lambda: open_sessions(server))
