"""omni_bls with null engines: what a plain Triton client gets."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.triton.client import (
    ENDLESS,
    HELLO,
    Answer,
    TritonCall,
    gauges,
    generate_stream,
    omni,
    open_sessions,
    speech,
    take_back,
)
from triton_omni.errors import from_wire
from triton_omni.serve.processes import model_stubs
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton

TOKENS, FRAMES = 40, 149  # the null engines' answer, and what is said of it
TEXT = "".join(f"w{i} " for i in range(TOKENS))


def test_four_models_are_ready(null_server: TritonServer) -> None:
    client = grpc.InferenceServerClient(null_server.grpc_target)
    assert all(client.is_model_ready(model) for model in ("thinker", "talker", "code2wav", "omni_bls"))
    client.close()


def test_text_alone_leaves_talker_and_code2wav_alone(null_server: TritonServer) -> None:
    answer = Answer(omni(null_server, {"messages": HELLO}))
    assert answer.text == TEXT
    assert answer.audio.size == 0
    assert answer.start == {"type": "start", "request_id": answer.start["request_id"], "usage": {"prompt_tokens": 32}}
    assert answer.end["type"] == "end" and answer.end["finish_reason"] == "stop"
    assert answer.end["usage"]["audio_frames"] == 0


def test_text_and_audio_come_on_one_stream(null_server: TritonServer) -> None:
    answer = Answer(omni(null_server, speech()))
    assert answer.text == TEXT
    assert answer.audio.dtype == np.int16 and answer.audio.size == FRAMES * 1920 - 555
    assert np.array_equal(answer.audio, _sawtooth(answer.audio.size))
    assert all(not event for _, _, event in answer.parts[1:-1])
    usage = {"prompt_tokens": 32, "completion_tokens": 189, "text_tokens": TOKENS}
    assert answer.end["usage"] == usage | {"audio_frames": FRAMES, "audio_samples": answer.audio.size}


def test_audio_does_not_wait_for_the_thinkers_end(null_server: TritonServer) -> None:
    """Which is a minute after its text: so long it calls functions."""
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(4000)]
    responses = iter(omni(null_server, speech(tools=tools)))
    while not next(responses)["AUDIO"].size:
        pass
    while b"tool_calls" not in next(responses)["EVENT"].item():
        pass


def test_generate_stream_over_http(null_server: TritonServer) -> None:
    events = generate_stream(null_server, "omni_bls", REQUEST=json.dumps(speech()))
    assert "".join(e["TEXT"] for e in events) == TEXT
    samples = [s for e in events for s in (e["AUDIO"] if isinstance(e["AUDIO"], list) else [e["AUDIO"]])]
    assert len(samples) == FRAMES * 1920 - 555
    assert json.loads(events[-1]["EVENT"])["finish_reason"] == "stop"


def test_media_reaches_the_thinker(null_server: TritonServer) -> None:
    content = [{"type": "audio", "media": 0}, {"type": "text", "text": "What is this?"}]
    answer = Answer(omni(null_server, speech(messages=[{"role": "user", "content": content}]), [b"RIFF\0\xff" * 1000]))
    assert answer.audio.size == FRAMES * 1920 - 555


@pytest.mark.parametrize(
    ("request_json", "code", "field"),
    [
        ("{", "invalid_request", "request"),
        ("[]", "invalid_request", "request"),
        ({}, "invalid_request", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_request", "messages[0].role"),
        ({"messages": HELLO, "modalities": "audio"}, "invalid_request", "modalities"),
        ({"messages": HELLO, "modalities": ["smell"]}, "invalid_request", "modalities[0]"),
        ({"messages": HELLO, "speeker": "ethan"}, "invalid_request", "speeker"),
        ({"messages": HELLO, "thinker": {"max_tokens": 0}}, "invalid_request", "thinker.max_tokens"),
        ({"messages": HELLO, "thinker": {"temperature": 3}}, "invalid_request", "thinker.temperature"),
        ({"messages": HELLO, "talker": {"top": 1}}, "invalid_request", "talker.top"),
        (speech(speaker="nobody"), "invalid_request", "speaker"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "media": 0}]}]}, "invalid_request", None),
    ],
)
def test_bad_requests_are_triton_errors_in_the_wire_form(
    null_server: TritonServer, request_json: dict | str, code: str, field: str | None
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        Answer(omni(null_server, request_json))
    error = from_wire(caught.value.message(), stage="none of these")
    assert (error.code, error.field) == (code, field or "messages[0].content[0].media")
    assert error.to_wire() == caught.value.message(), "one line, and nothing around it"


def test_too_many_requests_are_refused_and_the_others_served(tight_server: TritonServer, eventually) -> None:
    eventually(lambda: open_sessions(tight_server))
    keys = [str(uuid.uuid4()) for _ in range(4)]
    running = [iter(omni(tight_server, speech(talker=ENDLESS), cancel_key=key)) for key in keys]
    for each in running:
        next(each)
    waiting = [omni(tight_server, speech(talker={"max_frames": 8})) for _ in range(2)]
    eventually(lambda: gauges(tight_server)["omni_bls", "waiting"] != 2)
    for _ in range(2):
        with pytest.raises(InferenceServerException, match=r"^overloaded: 4 requests are running and 2 waiting"):
            Answer(omni(tight_server, speech()))
    for key in keys:
        take_back(tight_server, key)
    with ThreadPoolExecutor(len(waiting)) as threads:
        assert [answer.audio.size for answer in threads.map(Answer, waiting)] == [8 * 1920 - 555] * 2
    for each in running:
        with pytest.raises(InferenceServerException, match=r"^cancelled: "):
            list(each)


def test_a_stage_that_refuses_ends_the_request_with_its_own_error(null_server: TritonServer, eventually) -> None:
    """max_sequence_idle and slots aside, a child's error must arrive as it left."""
    before = gauges(null_server)
    with pytest.raises(
        InferenceServerException, match=r"^invalid_request \[messages\]: must hold at least one message"
    ):
        Answer(omni(null_server, {"messages": []}))
    message, failed = ("omni_bls", "request"), ("omni_bls", "failed")
    eventually(lambda: gauges(null_server)[message] == before[message])  # which is told last of what it has counted
    assert gauges(null_server)[failed] == before[failed], "it never was a request"


def test_null_servers_load_no_torch(null_server: TritonServer) -> None:
    stubs = model_stubs(null_server.pid)
    assert len(stubs) == 5
    for stub in stubs:
        assert "libtorch" not in Path(f"/proc/{stub.pid}/maps").read_text(), stub.name


def test_sixty_four_streams_leave_nothing_open(null_server: TritonServer, eventually) -> None:
    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda _: Answer(omni(null_server, speech())), range(64)))
    assert {(answer.text, answer.audio.size) for answer in answers} == {(TEXT, FRAMES * 1920 - 555)}
    eventually(lambda: open_sessions(null_server))


def _sawtooth(samples: int) -> np.ndarray:
    phase = np.arange(samples) * (220.0 / 24_000) % 1.0
    return ((phase - 0.5) * 2 * 3276).astype(np.int16)


def test_signs_of_life_for_who_asks(tight_server: TritonServer, eventually) -> None:
    """Also while a request waits for its turn, of which there are four."""
    keys = [str(uuid.uuid4()) for _ in range(5)]

    def ask(key: str, every_s: int) -> TritonCall:
        inputs = {"REQUEST": [json.dumps(speech(talker=ENDLESS))], "CANCEL_KEY": [key]}
        return TritonCall(tight_server, "omni_bls", inputs, parameters={"sign_of_life_s": every_s})

    answers = [iter(ask(key, 1)) for key in keys]
    for answer in answers:
        while part := next(answer):
            if (part["TEXT"].ravel()[0], part["AUDIO"].size, part["EVENT"].ravel()[0]) == (b"", 0, b"{}"):
                break
    for key in keys:
        take_back(tight_server, key)
    for answer in answers:
        with pytest.raises(InferenceServerException, match="cancelled"):
            list(answer)
    with pytest.raises(InferenceServerException, match=r"invalid_request \[sign_of_life_s\]: must be an integer of at"):
        list(ask("", 0))
    eventually(lambda: open_sessions(tight_server))
