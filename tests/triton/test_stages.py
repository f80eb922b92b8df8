"""The stages by themselves, as plain Triton clients use them (null engines)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.triton.client import HELLO, TritonCall, generate_stream, open_sessions
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton

WHOLE = {"sequence_start": True, "sequence_end": True}
PROMPT = np.arange(32, dtype=np.int32)


def _ids(count: int) -> np.ndarray:
    return np.arange(1000, 1000 + count, dtype=np.int32)


def _codes(responses: list[dict[str, np.ndarray]]) -> np.ndarray:
    return np.concatenate([response["CODES"] for response in responses])


def _reasons(responses: list[dict[str, np.ndarray]]) -> list[str]:
    return [response["FINISH_REASON"].ravel()[0].decode() for response in responses]


def test_thinker_streams_ids_and_text(null_server: TritonServer) -> None:
    request = {"messages": HELLO, "sampling": {"max_tokens": 5}}
    first, *rest = TritonCall(null_server, "thinker", {"REQUEST": [json.dumps(request)]})
    assert np.array_equal(first["PROMPT_TOKEN_IDS"], PROMPT) and "TEXT" not in first
    assert np.array_equal(np.concatenate([r["TOKEN_IDS"] for r in rest]), _ids(5))
    assert b"".join(r["TEXT"][0] for r in rest) == b"w0 w1 w2 w3 w4 "
    assert _reasons(rest)[-1] == "length" and not any(_reasons(rest)[:-1])


def test_thinker_over_http(null_server: TritonServer) -> None:
    events = generate_stream(null_server, "thinker", REQUEST=json.dumps({"messages": HELLO}))
    assert "".join(e.get("TEXT", "") for e in events).endswith("w39 ")


def test_thinker_cancel_by_id(null_server: TritonServer, eventually) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(4000)]  # a minute of calls
    request = {"request_id": "mine", "messages": HELLO, "tools": tools}
    responses = iter(TritonCall(null_server, "thinker", {"REQUEST": [json.dumps(request)]}))
    next(responses)
    cancel = {"REQUEST": [json.dumps({"op": "cancel", "request_id": "mine"})]}
    assert list(TritonCall(null_server, "thinker", cancel)) == []
    assert _reasons(list(responses))[-1] == "cancelled"
    eventually(lambda: open_sessions(null_server))


@pytest.mark.parametrize(
    ("request_json", "message"),
    [
        ({"messages": []}, "invalid_request [messages]: must hold at least one message"),
        ({"message": HELLO}, "invalid_request [message]: is not known; did you mean 'messages'?"),
        ({"op": "sing"}, "invalid_request [op]: must be one of generate, rows, cancel, got 'sing'"),
        ({"op": "cancel"}, "invalid_request [request_id]: must name a request, got ''"),
        ({"op": "rows", "request_id": "nobody"}, "not_found [request_id]: no rows of 'nobody'"),
        ({"messages": HELLO, "sampling": {"top_p": 0}}, "invalid_request [sampling.top_p]: must lie in (0, 1], got 0"),
    ],
)
def test_thinker_refuses_in_the_wire_form(null_server: TritonServer, request_json: dict, message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        list(TritonCall(null_server, "thinker", {"REQUEST": [json.dumps(request_json)]}))
    assert caught.value.message().startswith(message)


def test_a_whole_talker_session_in_one_request(null_server: TritonServer) -> None:
    inputs = {"PROMPT_TOKEN_IDS": PROMPT, "TOKEN_IDS": _ids(40)}
    opened, *rest = TritonCall(null_server, "talker", inputs, sequence_id="whole", **WHOLE)
    assert opened["CODES"].shape == (0, 16)
    assert [len(r["CODES"]) for r in rest] == [4, 8, 16, 25, 25, 25, 25, 21]
    assert _reasons(rest) == [""] * 7 + ["stop"]


def test_a_talker_session_with_its_own_plan_and_sampling(null_server: TritonServer) -> None:
    request = {"chunk_frames": [3, 10], "sampling": {"max_frames": 20}, "speaker": "ethan", "chunk_policy": "fixed"}
    inputs = {"REQUEST": [json.dumps(request)], "PROMPT_TOKEN_IDS": PROMPT, "TOKEN_IDS": _ids(40)}
    _, *rest = TritonCall(null_server, "talker", inputs, sequence_id="planned", **WHOLE)
    assert [len(r["CODES"]) for r in rest] == [3, 10, 7]
    assert _reasons(rest)[-1] == "length"


def test_a_talker_session_in_pieces(null_server: TritonServer) -> None:
    """The START's stream stays open over the later requests of its sequence, which answer nothing."""
    start = {"PROMPT_TOKEN_IDS": PROMPT, "TOKEN_IDS": _ids(10)}
    responses = iter(TritonCall(null_server, "talker", start, sequence_id="pieces", sequence_start=True))
    next(responses)
    for _ in range(3):
        assert list(TritonCall(null_server, "talker", {"TOKEN_IDS": _ids(10)}, sequence_id="pieces")) == []
    assert list(TritonCall(null_server, "talker", {}, sequence_id="pieces", sequence_end=True)) == []
    rest = list(responses)
    assert len(_codes(rest)) == 149 and _reasons(rest)[-1] == "stop"


def test_a_talker_session_cancelled_with_its_end(null_server: TritonServer, eventually) -> None:
    start = {"PROMPT_TOKEN_IDS": PROMPT, "TOKEN_IDS": _ids(1)}
    responses = iter(TritonCall(null_server, "talker", start, sequence_id="cancelled", sequence_start=True))
    next(responses)
    cancel = {"CANCEL": np.array([True])}
    assert list(TritonCall(null_server, "talker", cancel, sequence_id="cancelled", sequence_end=True)) == []
    assert _reasons(list(responses))[-1] == "cancelled"
    eventually(lambda: open_sessions(null_server))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"TOKEN_IDS": _ids(1)}, "invalid_request [PROMPT_TOKEN_IDS]: is missing"),
        (
            {"PROMPT_TOKEN_IDS": PROMPT, "REQUEST": ['{"chunk_frames": [0]}']},
            "invalid_request [chunk_frames[0]]: must lie in [1, 300] frames, got 0",
        ),
        (
            {"PROMPT_TOKEN_IDS": PROMPT, "REQUEST": ['{"chunk_frames": "4"}']},
            "invalid_request [chunk_frames]: must be a list of integers, got '4'",
        ),
        (
            {"PROMPT_TOKEN_IDS": PROMPT, "REQUEST": ['{"chunk_policy": "greedy"}']},
            "invalid_request [chunk_policy]: must be fixed or adaptive, got 'greedy'",
        ),
        (
            {"PROMPT_TOKEN_IDS": PROMPT, "REQUEST": ['{"sampling": {"max_frame": 1}}']},
            "invalid_request [sampling.max_frame]: is not known; did you mean 'max_frames'?",
        ),
        ({"PROMPT_TOKEN_IDS": PROMPT, "ROWS_DTYPE": ["float32"]}, "invalid_request [ROWS]: "),
    ],
)
def test_talker_refuses_in_the_wire_form(null_server: TritonServer, inputs: dict, message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        list(TritonCall(null_server, "talker", inputs, sequence_id=f"refused {message}", **WHOLE))
    assert caught.value.message().startswith(message)


def test_a_whole_utterance_in_one_request(null_server: TritonServer) -> None:
    codes = np.zeros((1, 25, 16), np.int32)
    (response,) = TritonCall(null_server, "code2wav", {"CODES": codes}, sequence_id="whole", **WHOLE)
    assert response["AUDIO"].shape == (1, 25 * 1920 - 555) and response["AUDIO"].dtype == np.int16


def test_an_utterance_in_chunks_ends_without_frames(null_server: TritonServer, eventually) -> None:
    samples = 0
    for frames, flags in ((4, {"sequence_start": True}), (8, {}), (0, {"sequence_end": True})):
        codes = np.zeros((1, frames, 16), np.int32)
        (response,) = TritonCall(null_server, "code2wav", {"CODES": codes}, sequence_id="chunks", **flags)
        samples += response["AUDIO"].size
    assert samples == 12 * 1920 - 555
    eventually(lambda: open_sessions(null_server))


def test_code2wav_refuses_in_the_wire_form(null_server: TritonServer) -> None:
    codes = np.zeros((1, 4, 3), np.int32)
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[codes\]: must be \[frames, 16\]"):
        list(TritonCall(null_server, "code2wav", {"CODES": codes}, sequence_id="narrow", **WHOLE))
