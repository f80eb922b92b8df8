"""What reaches omni_bls."""

from __future__ import annotations

import base64
import dataclasses

import pytest

from openai_frontend.schemas import TalkerOptions
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of
from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.sampling import TalkerSampling

pytestmark = pytest.mark.asyncio
WAV, PNG = b"RIFF....", b"\x89PNG...."
WAV_URL = "data:audio/wav;base64," + base64.b64encode(WAV).decode()
PNG_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


async def ask(make_app, body, engine=None):
    engine = engine or FakeEngine(START, END)
    async with client_of(make_app(engine)) as client:
        response = await client.post("/v1/chat/completions", json=body)
    return response, engine


async def wire_of(make_app, body):
    response, engine = await ask(make_app, body)
    assert response.status_code == 200, response.text
    request = dict(engine.request)
    assert request.pop("request_id") == response.headers["x-request-id"]
    return request, engine.media


async def test_a_plain_request_carries_no_defaults(make_app, chat):
    wire, media = await wire_of(make_app, chat())
    assert wire == {"messages": [{"role": "user", "content": "Hello"}], "modalities": ["text"]}
    assert list(media) == []


async def test_every_sampling_parameter_arrives(make_app, chat):
    thinker = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1, "min_tokens": 2}
    thinker |= {"ignore_eos": True, "stop_token_ids": [3, 4], "seed": 11}
    talker = {"temperature": 0.3, "top_k": 5, "top_p": 0.7, "repetition_penalty": 1.2, "max_frames": 9, "min_frames": 1}
    body = chat(**thinker, max_tokens=20, stop="###", talker=talker, chunk_frames=[2, 4], modalities=["audio"])
    wire, _ = await wire_of(make_app, body)
    assert wire["thinker"] == thinker | {"max_tokens": 20, "stop": ["###"]}
    assert wire["talker"] == talker | {"seed": 11}
    assert wire["chunk_frames"] == [2, 4]


@pytest.mark.parametrize(("first", "plan"), [(1, [1, 2, 4, 8, 16, 25]), (10, [10, 20, 25]), (60, [60])])
async def test_the_first_chunk_s_size(make_app, chat, first, plan):
    wire, _ = await wire_of(make_app, chat(initial_chunk_frames=first, modalities=["audio"]))
    assert wire["chunk_frames"] == plan


@pytest.mark.parametrize("asked", [True, False])
async def test_the_sound_of_videos(make_app, chat, asked):
    url = "data:video/mp4;base64,AAAA"
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]
    wire, media = await wire_of(make_app, chat(messages=messages, mm_processor_kwargs={"use_audio_in_video": asked}))
    assert wire["use_audio_in_video"] is asked
    assert wire["messages"][0]["content"] == [{"type": "video", "media": 0}]
    assert list(media) == [b"\0\0\0"]


@pytest.mark.parametrize("format_", ["wav", "mp3", "flac", "ogg", "m4a", "webm"])
async def test_the_formats_of_audio_in(make_app, chat, format_):
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": format_}}
    wire, media = await wire_of(make_app, chat(messages=[{"role": "user", "content": [part]}]))
    assert wire["messages"][0]["content"] == [{"type": "audio", "media": 0}]
    assert list(media) == [b"\0\0\0"]


async def test_labels_change_nothing(make_app, chat):
    labels = {"user": "me", "metadata": {"k": "v"}, "store": False, "safety_identifier": "x", "prompt_cache_key": "y"}
    wire, _ = await wire_of(make_app, chat(**labels))
    assert wire == (await wire_of(make_app, chat()))[0]


async def test_the_talkers_own_seed_wins(make_app, chat):
    wire, _ = await wire_of(make_app, chat(seed=1, talker={"seed": 2}, modalities=["audio"]))
    assert (wire["thinker"]["seed"], wire["talker"]["seed"]) == (1, 2)


async def test_talker_options_are_the_runtimes():
    assert list(TalkerOptions.model_fields) == [field.name for field in dataclasses.fields(TalkerSampling)]


async def test_max_completion_tokens_is_max_tokens(make_app, chat):
    wire, _ = await wire_of(make_app, chat(max_completion_tokens=5, max_tokens=5))
    assert wire["thinker"] == {"max_tokens": 5}


@pytest.mark.parametrize("key", ["audio", "speaker"])
async def test_voices_in_any_case(make_app, chat, checkpoint, key):
    voice = list(ModelConfig.load(checkpoint).speakers)[-1].upper()
    given = {"audio": {"voice": voice}} if key == "audio" else {"speaker": voice}
    wire, _ = await wire_of(make_app, chat(modalities=["text", "audio"], **given))
    assert wire["speaker"] == voice


async def test_audio_options_alone_ask_for_speech(make_app, chat):
    wire, _ = await wire_of(make_app, chat(audio={"format": "wav"}))
    assert wire["modalities"] == ["text", "audio"]


async def test_media_travel_beside_the_messages(make_app, chat):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": PNG_URL, "detail": "auto"}},
                {"type": "text", "text": "What is this?"},
                {"type": "audio_url", "audio_url": {"url": WAV_URL}},
            ],
        },
        {"role": "assistant", "content": None, "audio": {"id": "audio-1", "transcript": "A cat."}},
        {"role": "assistant", "content": "Really.", "refusal": None, "tool_calls": [], "annotations": []},
        {
            "role": "user",
            "content": [
                {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
            ],
        },
    ]
    wire, media = await wire_of(make_app, chat(messages=messages))
    assert wire["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "media": 0},
                {"type": "text", "text": "What is this?"},
                {"type": "audio", "media": 1},
            ],
        },
        {"role": "assistant", "content": "A cat."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": [{"type": "audio", "media": 2}]},
    ]
    assert list(media) == [PNG, WAV, WAV]


@pytest.mark.parametrize(
    ("wire_field", "param"),
    [
        ("messages[0].content[1].media", "messages[0].content[1]"),
        ("media[0]", "messages[0].content[1]"),
        ("MEDIA[0]", "messages[0].content[1]"),
        ("thinker.max_tokens", "max_completion_tokens"),
        ("thinker.temperature", "temperature"),
        ("talker.top_k", "talker.top_k"),
        ("speaker", "audio.voice"),
        ("messages", "messages"),
    ],
)
async def test_errors_of_the_runtime_name_the_clients_field(make_app, chat, wire_field, param):
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PNG_URL}}]
    body = chat(messages=[{"role": "user", "content": parts}], max_completion_tokens=9, audio={})
    response, _ = await ask(make_app, body, FakeEngine(InvalidRequestError(wire_field, "cannot be used")))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"] == f"{param}: cannot be used"


async def ask_with_a_prompt(make_app, body, engine):
    async with client_of(make_app(engine, speech_system_prompt="Speak briefly.")) as client:
        return await client.post("/v1/chat/completions", json=body)


async def test_the_operators_prompt_for_speech(make_app, chat):
    own = [{"role": "developer", "content": "Mine."}, {"role": "user", "content": "Hello"}]
    for body, told in (
        (chat(modalities=["text", "audio"]), ["Speak briefly.", "Hello"]),
        (chat(), ["Hello"]),
        (chat(modalities=["audio"], messages=own), ["Mine.", "Hello"]),
    ):
        engine = FakeEngine(START, END)
        assert (await ask_with_a_prompt(make_app, body, engine)).status_code == 200
        assert [message["content"] for message in engine.request["messages"]] == told


async def test_behind_the_operators_prompt_fields_keep_their_names(make_app, chat):
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PNG_URL}}]
    body = chat(messages=[{"role": "user", "content": parts}], modalities=["audio"])
    engine = FakeEngine(InvalidRequestError("messages[1].content[1].media", "cannot be used"))
    response = await ask_with_a_prompt(make_app, body, engine)
    assert response.json()["error"]["param"] == "messages[0].content[1]"
