from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.pipeline.support import HELLO, IMAGE, MODEL
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.chunk_policy import DEFAULT_CHUNK_FRAMES, ChunkPlan
from triton_omni.pipeline.request import RequestParser
from triton_omni.sampling import TalkerSampling, ThinkerSampling


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_defaults() -> None:
    request = RequestParser(MODEL).parse(json.dumps({"messages": HELLO}))
    assert not request.speech
    assert request.messages == tuple(HELLO)
    assert (request.speaker, request.async_chunk, request.use_audio_in_video) == ("ethan", True, False)
    assert request.chunk_plan.frames == DEFAULT_CHUNK_FRAMES
    assert request.thinker == ThinkerSampling(max_tokens=1024)
    assert request.talker == TalkerSampling.defaults(MODEL.generation)


def test_everything_given() -> None:
    values = {
        "messages": [{"role": "system", "content": "Be brief."}, *IMAGE],
        "modalities": ["audio"],
        "speaker": "CHELSIE",
        "thinker": {
            "temperature": 1,
            "max_tokens": 5,
            "stop": ["\n"],
            "logit_bias": {"7": -100, "8": 1.5},
            "logprobs": 0,
            "response_format": {"type": "json_object"},
        },
        "talker": {"temperature": 0, "max_frames": 7},
        "chunk_frames": [1, 2],
        "chunk_policy": "adaptive",
        "async_chunk": False,
        "use_audio_in_video": True,
        "request_id": "log me",
    }
    request = RequestParser(MODEL).parse(json.dumps(values).encode(), [b"png"])
    assert request.speech
    assert request.media == (b"png",)
    assert request.speaker == "chelsie"
    assert request.thinker == ThinkerSampling(
        temperature=1.0,
        max_tokens=5,
        stop=("\n",),
        logit_bias={7: -100.0, 8: 1.5},
        logprobs=0,
        response_format={"type": "json_object"},
    )
    assert request.talker == dataclasses.replace(
        TalkerSampling.defaults(MODEL.generation), temperature=0.0, max_frames=7
    )
    assert request.chunk_plan == ChunkPlan((1, 2), "adaptive")
    assert not request.async_chunk
    assert request.use_audio_in_video
    assert request.client_request_id == "log me"


def test_null_stands_for_an_absent_key() -> None:
    values = {"messages": HELLO, "speaker": None, "thinker": None, "chunk_frames": None, "modalities": None}
    assert RequestParser(MODEL).check(values) == RequestParser(MODEL).check({"messages": HELLO})


def test_own_defaults_of_the_server() -> None:
    parser = RequestParser(MODEL, chunk_frames=[2, 9], chunk_policy="adaptive", async_chunk=False)
    request = parser.check({"messages": HELLO})
    assert (request.chunk_plan, request.async_chunk) == (ChunkPlan((2, 9), "adaptive"), False)
    assert parser.check({"messages": HELLO, "chunk_policy": "fixed"}).chunk_plan == ChunkPlan((2, 9))
    assert parser.check({"messages": HELLO, "chunk_frames": [7]}).chunk_plan == ChunkPlan((7,), "adaptive")


BAD_JSON = [
    ("", "request", "JSON"),
    ("{", "request", "JSON"),
    ("[1]", "request", "object"),
    (b'{"messages": "\xff"}', "request", "UTF-8"),
    ('{"messages": NaN}', "request", "NaN"),
    ("[" * 100_000, "request", "deeply"),
]


@pytest.mark.parametrize(("text", "field", "says"), BAD_JSON)
def test_malformed_json(text: str | bytes, field: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestParser(MODEL).parse(text)
    assert caught.value.field == field
    assert says in caught.value.message


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": ["Hello"]}, "messages[0]", "object"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "system, user, assistant"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role", "system, user, assistant"),
    ({"messages": [{"content": ""}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "contents": ""}]}, "messages[0].contents", "'content'"),
    (user(None), "messages[0].content", "string or a non-empty list"),
    (user([]), "messages[0].content", "non-empty"),
    (user("\ud800"), "messages[0].content", "Unicode"),
    (user(["text"]), "messages[0].content[0]", '"type"'),
    (user([{"type": "file"}]), "messages[0].content[0].type", "text, audio, image, video"),
    (user([{"type": {}}]), "messages[0].content[0].type", "text, audio, image, video"),
    (user([{"type": "text"}]), "messages[0].content[0].text", "missing"),
    (user([{"type": "text", "text": 1}]), "messages[0].content[0].text", "string"),
    (user([{"type": "text", "text": "", "txt": ""}]), "messages[0].content[0].txt", "'text'"),
    (user([{"type": "text", "text": "a"}, {"type": "image"}]), "messages[0].content[1].media", "missing"),
    (user([{"type": "image", "media": 2}]), "messages[0].content[0].media", "0 to 1"),
    (user([{"type": "image", "media": -1}]), "messages[0].content[0].media", "0 to 1"),
    (user([{"type": "image", "media": True}]), "messages[0].content[0].media", "0 to 1"),
    (user([{"type": "image", "media": 0}]), "media", "file 1 of 2 is not used"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "image", "media": 0}]}]},
        "messages[0].content[0].type",
        "user",
    ),
    ({"messages": HELLO, "modalities": "audio"}, "modalities", '["text", "audio"]'),
    ({"messages": HELLO, "modalities": []}, "modalities", "empty"),
    ({"messages": HELLO, "modalities": ["text", "video"]}, "modalities[1]", "'text' or 'audio'"),
    ({"messages": HELLO, "modalities": [["text"]]}, "modalities[0]", "'text' or 'audio'"),
    ({"messages": HELLO, "modalities": ["text", "text"]}, "modalities", "once"),
    ({"messages": HELLO, "speaker": "alloy"}, "speaker", "chelsie, ethan"),
    ({"messages": HELLO, "speaker": 3}, "speaker", "chelsie, ethan"),
    ({"messages": HELLO, "thinker": []}, "thinker", "object"),
    ({"messages": HELLO, "thinker": {"temperature": 3}}, "thinker.temperature", "[0, 2]"),
    ({"messages": HELLO, "thinker": {"temprature": 1}}, "thinker.temprature", "'temperature'"),
    ({"messages": HELLO, "thinker": {"max_tokens": 0}}, "thinker.max_tokens", "at least 1"),
    ({"messages": HELLO, "thinker": {"min_p": 1.5}}, "thinker.min_p", "[0, 1]"),
    ({"messages": HELLO, "thinker": {"frequency_penalty": -3}}, "thinker.frequency_penalty", "[-2, 2]"),
    ({"messages": HELLO, "thinker": {"presence_penalty": "1"}}, "thinker.presence_penalty", "number"),
    ({"messages": HELLO, "thinker": {"repetition_penalty": 0}}, "thinker.repetition_penalty", "(0, 2]"),
    ({"messages": HELLO, "thinker": {"logprobs": 21}}, "thinker.logprobs", "[0, 20]"),
    ({"messages": HELLO, "thinker": {"logprobs": True}}, "thinker.logprobs", "integer"),
    ({"messages": HELLO, "thinker": {"logit_bias": [5]}}, "thinker.logit_bias", "object"),
    ({"messages": HELLO, "thinker": {"logit_bias": {"five": 1}}}, "thinker.logit_bias", "token ids"),
    ({"messages": HELLO, "thinker": {"logit_bias": {"-5": 1}}}, "thinker.logit_bias", "token ids"),
    ({"messages": HELLO, "thinker": {"logit_bias": {"5": None}}}, "thinker.logit_bias.5", "number"),
    ({"messages": HELLO, "thinker": {"logit_bias": {"5": 101}}}, "thinker.logit_bias.5", "[-100, 100]"),
    (
        {"messages": HELLO, "thinker": {"logit_bias": {str(i): 1 for i in range(1025)}}},
        "thinker.logit_bias",
        "at most 1024",
    ),
    ({"messages": HELLO, "thinker": {"stop": ["x"] * 65}}, "thinker.stop", "at most 64"),
    ({"messages": HELLO, "thinker": {"stop_token_ids": [1] * 65}}, "thinker.stop_token_ids", "at most 64"),
    ({"messages": HELLO, "thinker": {"response_format": "json"}}, "thinker.response_format", "object"),
    (
        {"messages": HELLO, "thinker": {"response_format": {"type": "xml"}}},
        "thinker.response_format.type",
        "text, json_object, json_schema",
    ),
    ({"messages": HELLO, "talker": {"max_frames": 0}}, "talker.max_frames", "at least 1"),
    ({"messages": HELLO, "talker": {"top_k": "50"}}, "talker.top_k", "integer"),
    ({"messages": HELLO, "chunk_frames": 4}, "chunk_frames", "list"),
    ({"messages": HELLO, "chunk_policy": "greedy"}, "chunk_policy", "fixed or adaptive"),
    ({"messages": HELLO, "chunk_frames": []}, "chunk_frames", "1 to 64"),
    ({"messages": HELLO, "chunk_frames": [4, 0]}, "chunk_frames[1]", "[1, 300]"),
    ({"messages": HELLO, "chunk_frames": [4.0]}, "chunk_frames[0]", "integer"),
    ({"messages": HELLO, "chunk_frames": [301]}, "chunk_frames[0]", "[1, 300]"),
    ({"messages": HELLO, "async_chunk": 1}, "async_chunk", "true or false"),
    ({"messages": HELLO, "use_audio_in_video": "yes"}, "use_audio_in_video", "true or false"),
    ({"messages": HELLO, "request_id": "a\nb"}, "request_id", "printable"),
    ({"messages": HELLO, "request_id": "a" * 129}, "request_id", "128"),
    ({"messages": HELLO, "modality": ["text"]}, "modality", "'modalities'"),
]


@pytest.mark.parametrize(("values", "field", "says"), BAD_REQUESTS, ids=lambda v: v if isinstance(v, str) else "")
def test_errors_name_the_field_and_what_is_accepted(values: dict[str, Any], field: str, says: str) -> None:
    media = [b"a", b"b"] if "media" in field or "image" in str(values) else []
    with pytest.raises(InvalidRequestError) as caught:
        RequestParser(MODEL).parse(json.dumps(values), media)
    assert caught.value.field == field
    assert says in caught.value.message


def test_media_without_files_and_empty_files() -> None:
    parser = RequestParser(MODEL)
    for media, says in ([], "brings no files"), ([b""], "empty"):
        with pytest.raises(InvalidRequestError, match=says) as caught:
            parser.check({"messages": IMAGE}, media)
        assert caught.value.field == "messages[0].content[0].media"


def test_errors_stay_short() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestParser(MODEL).check(user([["x" * 100_000] * 1000]))
    assert len(caught.value.to_wire()) < 500


def test_checkpoint_that_does_not_speak() -> None:
    parser = RequestParser(dataclasses.replace(MODEL, raw={"enable_audio_output": False}))
    assert not parser.check({"messages": HELLO}).speech
    for values, field in ({"modalities": ["text", "audio"]}, "modalities"), ({"speaker": "ethan"}, "speaker"):
        with pytest.raises(InvalidRequestError, match="no speech output") as caught:
            parser.check({"messages": HELLO, **values})
        assert caught.value.field == field
