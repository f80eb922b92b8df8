"""The real engines on the demo checkpoint, through a real tritonserver."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.oracle import Oracle
from tests.pipeline.test_parity import CASES, FRAMES, TEXT_TOKENS, Case, assert_same_sound, int16
from tests.triton.client import HELLO, Answer, TritonCall, omni, open_sessions, speech
from triton_omni.model_config import ModelConfig
from triton_omni.serve.tritonserver import TritonServer

pytestmark = pytest.mark.triton

GREEDY = {"thinker": {"temperature": 0, "repetition_penalty": 1}, "talker": {"temperature": 0}}
QUESTIONS = [f"Question number {number}: what is {'very ' * number}far away?" for number in range(16)]


def _greedy(case: Case) -> dict[str, Any]:
    thinker = GREEDY["thinker"] | {"max_tokens": TEXT_TOKENS}
    talker = GREEDY["talker"] | {"max_frames": FRAMES}
    return speech(messages=case.messages, speaker=case.speaker, thinker=thinker, talker=talker)


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_sound_equals_transformers(demo_server: TritonServer, oracle: Oracle, name: str) -> None:
    case = CASES[name]
    expected = oracle.answer(
        case.messages, case.media, speaker=case.speaker, max_text_tokens=TEXT_TOKENS, max_frames=FRAMES
    )
    answer = Answer(omni(demo_server, _greedy(case), list(case.media)))
    assert expected.wave is not None
    assert answer.text == expected.text
    assert answer.end["usage"]["audio_frames"] == len(expected.codes) > 0
    assert_same_sound(answer.audio, int16(expected.wave))


def test_audio_arrives_before_the_text_is_finished(demo_server: TritonServer) -> None:
    Answer(omni(demo_server, speech(thinker={"max_tokens": 4}, talker={"max_frames": 4})))  # nothing is cold
    thinker, talker = {"ignore_eos": True, "max_tokens": 3500}, {"temperature": 0, "min_frames": 60, "max_frames": 60}
    responses = iter(omni(demo_server, speech(thinker=thinker, talker=talker)))
    assert next(r["AUDIO"].size for r in responses if r["AUDIO"].size) == 4 * 1920 - 555
    assert any(r["TEXT"].item() for r in responses)


def test_sixteen_at_once_each_get_what_they_get_alone(demo_server: TritonServer, eventually) -> None:
    requests = [
        speech(
            messages=[{"role": "user", "content": q}], thinker={"max_tokens": 10}, talker={"max_frames": 30, "seed": 7}
        )
        for q in QUESTIONS
    ]
    with ThreadPoolExecutor(len(requests)) as threads:
        together = list(threads.map(lambda request: Answer(omni(demo_server, request)), requests))
    assert all(answer.audio.size for answer in together)
    assert len({answer.audio.tobytes() for answer in together}) == len(requests), "sixteen times the same tells nothing"
    for request, answer in zip(requests, together, strict=True):
        alone = Answer(omni(demo_server, request))
        assert alone.text == answer.text
        assert_same_sound(answer.audio, alone.audio)
    eventually(lambda: open_sessions(demo_server))


def test_cancel_frees_all_three_stages(demo_server: TritonServer, eventually) -> None:
    endless = {"ignore_eos": True, "max_tokens": 3500}  # nothing can have come to its end before the cancel arrives
    every_stage = {"thinker running", "talker running", "code2wav running"}
    call = omni(demo_server, speech(thinker=endless, talker={"min_frames": 3500, "max_frames": 3500}))
    try:
        responses = iter(call)
        while not next(responses)["AUDIO"].size:
            pass
        eventually(lambda: every_stage - open_sessions(demo_server).keys())
    finally:
        call.cancel()
    eventually(lambda: open_sessions(demo_server))
    assert Answer(omni(demo_server, speech(talker={"max_frames": 4}))).audio.size == 4 * 1920 - 555


def test_log_probabilities_come_with_the_text_they_are_of(demo_server: TritonServer) -> None:
    thinker = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True, "frequency_penalty": 0.5, "logit_bias": {"300": 2}}
    answer = Answer(omni(demo_server, speech(thinker=thinker, talker={"max_frames": 8})))
    given = b""
    for text, _, event in answer.parts[1:-1]:
        entries = event.get("logprobs", [])
        given += b"".join(bytes(entry["bytes"]) for entry in entries)
        assert bool(text) <= bool(entries)
        assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert given.decode() == answer.text
    assert answer.audio.size == 8 * 1920 - 555


def test_ids_outside_the_vocabulary_are_refused_by_name(demo_server: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[thinker\.logit_bias\]: .* got 9999999"):
        Answer(omni(demo_server, speech(thinker={"logit_bias": {"9999999": 1}})))


def test_an_answer_in_a_form_is_spoken_as_it_is_written(
    demo_server: TritonServer, request: pytest.FixtureRequest
) -> None:
    schema = {"enum": ["the red one", "the green one"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    asked = speech(thinker={"response_format": wanted, "max_tokens": 60}, talker={"max_frames": 8})
    if request.node.callspec.params["demo_server"] == "transformers":
        with pytest.raises(InferenceServerException, match=r"^invalid_request \[thinker\.response_format\.type\]"):
            Answer(omni(demo_server, asked))
        return
    answer = Answer(omni(demo_server, asked))
    assert json.loads(answer.text) in schema["enum"]
    assert answer.audio.size == 8 * 1920 - 555
    hostile = {"type": "array", "items": {"type": "string"}, "minItems": 10**8}
    wanted["json_schema"] = {"name": "hostile", "schema": hostile}
    where = r"^invalid_request \[thinker\.response_format\.json_schema\.schema\]: .*simpler"
    with pytest.raises(InferenceServerException, match=where):
        Answer(omni(demo_server, asked))


def test_bad_media_is_refused_by_name(demo_server: TritonServer, eventually) -> None:
    content = [{"type": "audio", "media": 0}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[messages\[0\]\.content\[0\]"):
        Answer(omni(demo_server, speech(messages=[{"role": "user", "content": content}]), [b"no sound at all"]))
    eventually(lambda: open_sessions(demo_server))


def test_a_prompt_longer_than_the_context_is_refused(demo_server: TritonServer) -> None:
    long = [{"role": "user", "content": "word " * 50_000}]
    with pytest.raises(InferenceServerException, match=r"^invalid_request \[messages\]"):
        Answer(omni(demo_server, {"messages": long}))


def test_the_stages_by_hand_say_what_omni_bls_says(demo_server: TritonServer, checkpoint) -> None:
    """A plain client walks the three models itself: whole text, whole codes, whole utterance."""
    whole = {"sequence_start": True, "sequence_end": True}
    sampling = GREEDY["thinker"] | {"max_tokens": 8}
    request = {"messages": HELLO, "sampling": sampling}
    prompt, *text = TritonCall(demo_server, "thinker", {"REQUEST": [json.dumps(request)]})
    ids = np.concatenate([response["TOKEN_IDS"] for response in text])
    talk = {"sampling": GREEDY["talker"] | {"max_frames": 20}, "speaker": ModelConfig.load(checkpoint).default_speaker}
    inputs = {"REQUEST": [json.dumps(talk)], "PROMPT_TOKEN_IDS": prompt["PROMPT_TOKEN_IDS"], "TOKEN_IDS": ids}
    chunks = [r["CODES"] for r in TritonCall(demo_server, "talker", inputs, sequence_id="by hand", **whole)]
    codes = np.concatenate(chunks)[np.newaxis]
    (sound,) = TritonCall(demo_server, "code2wav", {"CODES": codes}, sequence_id="by hand", **whole)
    answer = Answer(omni(demo_server, speech(thinker=sampling, talker=talk["sampling"])))
    assert list(itertools.accumulate(map(len, chunks)))[:3] == [0, 4, 12]
    assert_same_sound(sound["AUDIO"].ravel(), answer.audio)
