"""Requests with tools on the engines: scripted answers on transformers, answers held to calls on vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.pipeline.support import Counted
from tests.thinker.support import Answered, ask, request, send
from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.local import LocalCode2Wav, LocalTalker, LocalThinker
from triton_omni.pipeline.null import NullCode2Wav, NullTalker, NullTalkerConfig
from triton_omni.pipeline.pipeline import OmniPipeline
from triton_omni.pipeline.request import RequestParser
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker import transformers_engine as engine_module
from triton_omni.thinker.tool_calls import BEGIN, END
from triton_omni.thinker.transformers_engine import TransformersThinker
from triton_omni.tools import ToolUse, joined

CITY = {"type": "string", "enum": ["Graz", "Wien"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
GRAZ = f'{BEGIN}\n{{"name": "weather", "arguments": {{"city": "Graz", "days": 2}}}}\n{END}'
NOON = f'{BEGIN}\n{{"name": "now", "arguments": {{}}}}\n{END}'

Script = Callable[[str], None]


@pytest.fixture
def script(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Makes the transformers engine say a text, whatever its model would say."""
    ids: list[int] = []

    class ScriptedSampler:
        def __init__(self, *_: Any) -> None:
            self._left = iter([*ids, tokenizer.eos_token_id])

        def draw(self, _: Any) -> int:
            return next(self._left)

    def say(text: str) -> None:
        ids[:] = tokenizer.encode(text, add_special_tokens=False)

    monkeypatch.setattr(engine_module, "Sampler", ScriptedSampler)
    yield say


def calls(sink: Answered) -> list[tuple[str, Any]]:
    deltas = joined(delta for event in sink.events for delta in event.tool_calls)
    assert [delta["index"] for delta in deltas] == list(range(len(deltas)))
    return [(delta["function"]["name"], json.loads(delta["function"]["arguments"])) for delta in deltas]


def call_ids(sink: Answered) -> list[int]:
    return [int(i) for event in sink.events for i in event.call_token_ids]


def test_text_then_calls(transformers_engine: TransformersThinker, script: Script, tokenizer: Any) -> None:
    script(f"Let me see.\n{GRAZ}\n{NOON}")
    sink = ask(transformers_engine, request("hi", tools=ToolUse((WEATHER, NOW)), logprobs=0))
    assert sink.text == tokenizer.decode(sink.ids) == "Let me see."
    assert calls(sink) == [("weather", {"city": "Graz", "days": 2}), ("now", {})]
    assert tokenizer.decode(call_ids(sink)) == f"\n{GRAZ}\n{NOON}"
    assert sink.finish_reason == "stop"
    told = [entry["token"] for event in sink.events for entry in event.logprobs]
    assert "".join(told) == f"Let me see.\n{GRAZ}\n{NOON}"
    assert sum(bool(event.tool_calls) for event in sink.events) > 5, "arguments are to stream"


def test_one_call_ends_the_answer_where_no_more_are_wanted(
    transformers_engine: TransformersThinker, script: Script, tokenizer: Any
) -> None:
    script(f"{GRAZ}\n{NOON}")
    sink = ask(transformers_engine, request("hi", tools=ToolUse((WEATHER, NOW), parallel=False)))
    assert (sink.ids, sink.text, sink.finish_reason) == ([], "", "stop")
    assert calls(sink) == [("weather", {"city": "Graz", "days": 2})]
    assert len(call_ids(sink)) <= len(tokenizer.encode(GRAZ, add_special_tokens=False))


def test_without_tools_calls_are_text(transformers_engine: TransformersThinker, script: Script) -> None:
    script(NOON)
    sink = ask(transformers_engine, request("hi"))
    assert sink.text == NOON
    assert not calls(sink) and not call_ids(sink)


def test_a_malformed_call_is_text_and_spoken(
    transformers_engine: TransformersThinker, script: Script, tokenizer: Any
) -> None:
    broken = f'See {BEGIN}\n{{"name": "weather"}}\n{END} there'
    script(broken)
    sink = ask(transformers_engine, request("hi", tools=ToolUse((WEATHER,))))
    assert sink.text == tokenizer.decode(sink.ids) == broken
    assert not calls(sink) and not call_ids(sink)


def test_a_call_that_is_cut(transformers_engine: TransformersThinker, script: Script, tokenizer: Any) -> None:
    script(GRAZ)
    most = len(tokenizer.encode(GRAZ, add_special_tokens=False)) - 8
    sink = ask(transformers_engine, request("hi", tools=ToolUse((WEATHER,)), max_tokens=most))
    told = [delta["function"]["arguments"] for event in sink.events for delta in event.tool_calls]
    assert sink.finish_reason == "length"
    assert GRAZ[GRAZ.index('{"city') :].startswith("".join(told)) and "".join(told)
    assert len(call_ids(sink)) == most


def test_cancelled_in_the_middle_of_a_call(transformers_engine: TransformersThinker, script: Script) -> None:
    script(f'{BEGIN}\n{{"name": "now", "arguments": {{"a": "{"b " * 2000}')
    asked = request("hi", tools=ToolUse((NOW,)))
    sink = send(transformers_engine, asked).until(lambda sink: any(event.tool_calls for event in sink.events))
    transformers_engine.abort(asked.request_id)
    assert sink.done().finish_reason == "cancelled"
    assert transformers_engine.stats() == {"running": 0, "waiting": 0}


def test_the_talker_gets_what_is_said_and_nothing_else(
    transformers_engine: TransformersThinker, script: Script, tokenizer: Any, model_config: ModelConfig
) -> None:
    script(f"Let me see.\n{GRAZ}\n{NOON}\nOne moment.")
    talker, vocoder = NullTalker(NullTalkerConfig(frame_ms=0.2)), NullCode2Wav()
    counted = Counted(LocalTalker(talker))
    pipeline = OmniPipeline(LocalThinker(transformers_engine), counted, LocalCode2Wav(vocoder))
    values = {"messages": [{"role": "user", "content": "hi"}], "modalities": ["text", "audio"], "tools": [WEATHER, NOW]}
    events = list(pipeline.stream(RequestParser(model_config).check(values)))
    pipeline.close()
    talker.close()
    vocoder.close()
    starts = [call[2].token_ids for call in counted.named("start")]
    spoken = np.concatenate([*starts, *(call[2] for call in counted.named("append"))])
    assert tokenizer.decode(spoken) == "".join(event.text for event in events) == "Let me see.\nOne moment."
    assert sum(event.audio.size for event in events) == events[-1].info["usage"]["audio_samples"] > 0
    assert events[-1].info["finish_reason"] == "tool_calls"
    written = len(tokenizer.encode(f"Let me see.\n{GRAZ}\n{NOON}\nOne moment.", add_special_tokens=False))
    assert events[-1].info["usage"]["text_tokens"] == written


@pytest.mark.parametrize(
    ("use", "field"),
    [
        (ToolUse((NOW,), "required"), "tool_choice"),
        (ToolUse((NOW, WEATHER), "named", "now"), "tool_choice"),
        (ToolUse((NOW, STRICT)), "tools[1].function.strict"),
    ],
)
def test_transformers_does_not_promise_calls(
    transformers_engine: TransformersThinker, use: ToolUse, field: str
) -> None:
    sink = ask(transformers_engine, request("hi", tools=use))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == field
    assert "vllm" in sink.error.message


@pytest.mark.vllm
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_a_named_function_is_called_and_no_other(vllm_engine: ThinkerEngine, sampling: dict[str, Any]) -> None:
    use = ToolUse((NOW, WEATHER), "named", "weather", parallel=False)
    sink = ask(vllm_engine, request("What is the weather in Graz?", tools=use, max_tokens=200, **sampling))
    ((name, arguments),) = calls(sink)
    assert (name, sink.text, sink.ids, sink.finish_reason) == ("weather", "", [], "stop")
    assert arguments["city"] in ("Graz", "Wien") and arguments["days"] in (1, 2, 3) and len(arguments) == 2


@pytest.mark.vllm
def test_one_call_after_the_other_where_one_is_required(vllm_engine: ThinkerEngine, tokenizer: Any) -> None:
    """The bias makes the model call again and again; nothing but calls comes until the limit."""
    begin = tokenizer.convert_tokens_to_ids(BEGIN)
    use = ToolUse((NOW, WEATHER), "required")
    (line,) = tokenizer.encode("\n", add_special_tokens=False)
    sink = ask(vllm_engine, request("Well?", tools=use, logit_bias={begin: 100.0, line: 90.0}, max_tokens=160))
    assert (sink.text, sink.ids, sink.finish_reason) == ("", [], "length")
    deltas = joined(delta for event in sink.events for delta in event.tool_calls)
    assert len(deltas) > 1
    for delta in deltas[:-1]:
        arguments = json.loads(delta["function"]["arguments"])
        assert arguments == {} if delta["function"]["name"] == "now" else arguments["city"] in ("Graz", "Wien")
    assert call_ids(sink)[0] == begin, "the tag is to be the model's own token"


@pytest.mark.vllm
def test_calls_that_the_model_chooses_fit_strict_functions(vllm_engine: ThinkerEngine, tokenizer: Any) -> None:
    """The bias makes it begin a call; from there on the function's parameters hold it."""
    bias = {tokenizer.convert_tokens_to_ids(BEGIN): 100.0}
    use = ToolUse((STRICT,), parallel=False)
    sink = ask(vllm_engine, request("hi", tools=use, logit_bias=bias, max_tokens=200))
    ((name, arguments),) = calls(sink)
    assert name == "weather" and arguments["city"] in ("Graz", "Wien") and arguments["days"] in (1, 2, 3)
    assert sink.finish_reason == "stop"


@pytest.mark.vllm
def test_tools_beside_text_leave_the_answer_free(vllm_engine: ThinkerEngine, transformers_engine: Any) -> None:
    asked = {"tools": ToolUse((WEATHER, NOW)), "max_tokens": 12}
    sinks = [ask(engine, request("Who are you?", **asked)) for engine in (vllm_engine, transformers_engine)]
    assert sinks[0].ids == sinks[1].ids and sinks[0].text == sinks[1].text != ""


@pytest.mark.vllm
def test_json_or_calls(vllm_engine: ThinkerEngine, tokenizer: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9}}}
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    asked = {"tools": ToolUse((strict,), parallel=False), "response_format": form, "max_tokens": 100}
    no_call = {tokenizer.convert_tokens_to_ids(BEGIN): -100.0}
    plain = ask(vllm_engine, request("hi", **asked, logit_bias=no_call))
    assert isinstance(json.loads(plain.text), int) and not calls(plain)
    call = {tokenizer.convert_tokens_to_ids(BEGIN): 100.0}
    assert calls(ask(vllm_engine, request("hi", **asked, logit_bias=call))) == [("now", {})]


@pytest.mark.vllm
def test_the_second_turn_has_the_results(vllm_engine: ThinkerEngine) -> None:
    use = ToolUse((WEATHER,), "named", "weather", parallel=False)
    first = ask(vllm_engine, request("The weather in Graz?", tools=use, max_tokens=200))
    (delta,) = joined(delta for event in first.events for delta in event.tool_calls)
    call = {key: delta[key] for key in ("id", "type", "function")}
    messages = [
        {"role": "user", "content": "The weather in Graz?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": call["id"]},
    ]
    second = ask(vllm_engine, request(None, messages=messages, tools=ToolUse((WEATHER,)), max_tokens=12))
    spoken_so_far = [*first.prompt, *call_ids(first)]
    assert second.prompt[: len(spoken_so_far)] == spoken_so_far, "the answer is to be found in the prefix cache"
    assert second.text and second.ids


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ((NOW, {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "if": {}}}}), "tools"),
        (({"type": "function", "function": {"name": "f", "parameters": {"minProperties": -1}}},),
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_held_to_are_named(vllm_engine: ThinkerEngine, tools: Any, field: str) -> None:
    sink = ask(vllm_engine, request("hi", tools=ToolUse(tools, "required")))
    assert isinstance(sink.error, InvalidRequestError)
    assert sink.error.field == field
    loose = tuple({**tool, "function": {**tool["function"], "strict": False}} for tool in tools)
    sink = ask(vllm_engine, request("hi", tools=ToolUse(loose, "required"), max_tokens=20))
    assert sink.error is None and call_ids(sink) and not sink.text
