"""Requests the thinker refuses, each by the name of the field, and prompts as the model's template has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.oracle import Oracle
from tests.thinker.support import Media, ask, mkv, png, request, wav
from triton_omni.demo.chat_template import CHAT_TEMPLATE
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.tools import ToolUse

SILENT = wav(np.zeros(0))


def user(*parts: Any) -> list[Any]:
    return [{"role": "system", "content": "be nice"}, {"role": "user", "content": [*parts]}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("messages", "field", "told"),
    [
        ([], "messages", "at least one"),
        ([7], "messages[0]", "object"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "user"),
        ([{"content": "x"}], "messages[0].role", "None"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 7}], "messages[1].content", "list of parts"),
        (user("x"), "messages[1].content[0]", "audio, image, video"),
        (user(text("x"), {"type": "smell", "media": 0}), "messages[1].content[1]", "audio, image, video"),
        (user({"type": "text", "text": 7}), "messages[1].content[0].text", "string"),
        (user({"type": "image"}), "messages[1].content[0].media", "None"),
        (user({"type": "image", "media": 9}), "messages[1].content[0].media", "below 3"),
        (user({"type": "image", "media": -1}), "messages[1].content[0].media", "-1"),
        (user({"type": "image", "media": True}), "messages[1].content[0].media", "True"),
        (user(text("a"), {"type": "image", "media": 0}), "messages[1].content[1]", "image"),
        (user(text("a"), {"type": "audio", "media": 0}), "messages[1].content[1]", "audio"),
        (user(text("a"), {"type": "audio", "media": 1}), "messages[1].content[1]", "0 samples"),
        (user(text("a"), {"type": "video", "media": 0}), "messages[1].content[1]", "video"),
        (user({"type": "image", "media": 2}), "messages", "aspect ratio"),
        (user(text("a<|audio_pad|>b")), "messages[1].content[0].text", "<|audio_pad|>"),
        ([{"role": "user", "content": "<|vision_start|>"}], "messages[0].content", "<|vision_start|>"),
    ],
)
def test_refused(engine: ThinkerEngine, messages: Any, field: str, told: str) -> None:
    narrow = png(np.zeros((2, 900, 3), np.uint8))
    sink = ask(engine, request(None, messages=messages, media=(b"junk", SILENT, narrow)))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == field
    assert told in sink.error.message
    assert sink.events == []


def test_media_without_any_sent(engine: ThinkerEngine) -> None:
    sink = ask(engine, request([{"type": "audio", "media": 0}]))
    assert sink.error is not None and sink.error.field == "messages[0].content[0].media"


def test_audio_in_video_needs_a_track(engine: ThinkerEngine, media: Media) -> None:
    content = [{"type": "video", "media": 0}]
    sink = ask(engine, request(content, media=(mkv(media.frames, None),), use_audio_in_video=True))
    assert sink.error is not None and sink.error.field == "messages[0].content[0]"
    assert "no audio track" in sink.error.message


def test_a_prompt_longer_than_the_context(engine: ThinkerEngine, tokenizer: Any, checkpoint: Any) -> None:
    from triton_omni.model_config import ModelConfig

    context = ModelConfig.load(checkpoint).context_tokens
    one = len(tokenizer.encode("x ", add_special_tokens=False))
    sink = ask(engine, request("x " * (context // one + 1)))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == "messages"
    assert f"at most {context - 1}" in sink.error.message


def test_the_prompt_is_the_template_s(engine: ThinkerEngine, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, *user(text("a"), text("b"))]
    sink = ask(engine, request(None, messages=messages, max_tokens=1))
    plain = [m | {"content": m["content"] if isinstance(m["content"], str) else "ab"} for m in messages]
    assert sink.prompt == tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)


CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Graz é"}'}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a <city>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "strict": None}}


def test_tools_calls_and_results_are_the_template_s(engine: ThinkerEngine, oracle: Oracle, tokenizer: Any) -> None:
    messages = [
        *user(text("a")),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {**CALL, "id": "b"}]},
        {"role": "tool", "content": "rain", "tool_call_id": "a"},
        {"role": "tool", "content": [text('{"sun": '), text("1}")], "tool_call_id": "b"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "snow", "tool_call_id": "a"},
        {"role": "user", "content": "And now?"},
    ]
    for tools in ([WEATHER, NOW], None):
        use = ToolUse(tuple(tools)) if tools else None
        sink = ask(engine, request(None, messages=messages, tools=use, max_tokens=1))
        template = oracle.processor.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert sink.prompt == tokenizer.encode(template, add_special_tokens=False)


def test_the_demo_s_template_has_the_published_form() -> None:
    """Of https://qwen.readthedocs.io/en/latest/framework/function_call.html."""
    calls = [CALL, {"function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "1"},
    ]
    (told,), _ = render_jinja_template(
        [messages], tools=[WEATHER, NOW], chat_template=CHAT_TEMPLATE, add_generation_prompt=True
    )
    assert told == PUBLISHED_FORM


PUBLISHED_FORM = """<|im_start|>system
be nice

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "weather", "description": "Tells the weather of a <city>.", \
"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
{"type": "function", "function": {"name": "now", "strict": null}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
a<|im_end|>
<|im_start|>assistant
Let me see.
<tool_call>
{"name": "weather", "arguments": {"city": "Graz é"}}
</tool_call>
<tool_call>
{"name": "f", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
rain
</tool_response>
<tool_response>
1
</tool_response><|im_end|>
<|im_start|>assistant
"""


@pytest.mark.parametrize(
    ("messages", "tool", "field"),
    [
        ([{"role": "tool", "content": "<|audio_pad|>", "tool_call_id": "a"}], NOW, "messages[0].content"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "<|image_pad|>"}]}],
            NOW,
            "messages[0].tool_calls[0]",
        ),
        (
            [{"role": "user", "content": "x"}],
            {"type": "function", "function": {"name": "f", "description": "<|video_pad|>"}},
            "tools[0]",
        ),
    ],
)
def test_media_s_tokens_are_refused_wherever_they_stand(
    engine: ThinkerEngine, messages: Any, tool: Any, field: str
) -> None:
    sink = ask(engine, request(None, messages=messages, tools=ToolUse((tool,))))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == field
    assert "stands for media" in sink.error.message
