"""What steers the choice of tokens does on both engines what vLLM and OpenAI say, by transformers' own logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle import Oracle
from tests.thinker.support import Answered, ask, request
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.sampling import ThinkerSampling

FREE: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SAY = "tell me about the weather"


def logits_of(oracle: Oracle, sink: Answered) -> torch.Tensor:
    """[answer tokens, V] in one forward over prompt and answer, float32."""
    ids = torch.tensor([sink.prompt + sink.ids])
    with torch.inference_mode():
        logits: torch.Tensor = oracle.model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0, len(sink.prompt) - 1 : -1].float()


def steered(row: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], sampling: ThinkerSampling) -> torch.Tensor:
    """vLLM's documented order: bias, repetition, frequency, presence."""
    row = row.clone()
    for token_id, bias in sampling.logit_bias.items():
        row[token_id] += bias
    for token_id in {*prompt, *answer}:
        penalty = sampling.repetition_penalty
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id in set(answer):
        row[token_id] -= sampling.frequency_penalty * list(answer).count(token_id) + sampling.presence_penalty
    return row


def rows_of(oracle: Oracle, sink: Answered, options: Mapping[str, Any]) -> list[torch.Tensor]:
    sampling = ThinkerSampling(**options)
    logits = logits_of(oracle, sink)
    return [steered(row, sink.prompt, sink.ids[:i], sampling) for i, row in enumerate(logits)]


QUIET, SLOWLY, OLD = 280, 311, 265  # words of the demo's vocabulary
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 1.0},
    "rewards": {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {QUIET: -100.0, SLOWLY: -3.0, OLD: 2.0}},
    "all": {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {SLOWLY: -100.0, OLD: 4.0},
        "min_p": 0.2,
        "top_p": 0.5,
    },
}


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_follow_the_steered_logits(engine: ThinkerEngine, oracle: Oracle, case: str) -> None:
    sink = ask(engine, request(SAY, **CASES[case], **FREE))
    assert len(sink.ids) == FREE["max_tokens"]
    assert sink.ids == [int(row.argmax()) for row in rows_of(oracle, sink, CASES[case])]


def test_each_of_them_changes_the_answer(engine: ThinkerEngine) -> None:
    answers = {tuple(ask(engine, request(SAY, **options, **FREE)).ids) for options in CASES.values()}
    assert len(answers) == len(CASES)


@pytest.mark.parity
def test_min_p_keeps_what_is_likely_enough(engine: ThinkerEngine, oracle: Oracle) -> None:
    for seed in range(4):
        options = {"temperature": 1.5, "min_p": 0.3, "seed": seed}
        sink = ask(engine, request(SAY, **options, **FREE))
        for row, token_id in zip(logits_of(oracle, sink), sink.ids, strict=True):
            probabilities = (row / 1.5).softmax(-1)
            assert probabilities[token_id] >= 0.3 * probabilities.max() * 0.999
    greedy = ask(engine, request(SAY, **FREE)).ids
    assert ask(engine, request(SAY, temperature=1.5, min_p=1.0, seed=1, **FREE)).ids == greedy


def test_a_seed_repeats_an_answer_and_others_differ(engine: ThinkerEngine) -> None:
    hot: dict[str, Any] = {"temperature": 1.5} | FREE
    first, again, other = (ask(engine, request(SAY, seed=seed, **hot)).ids for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parity
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_logprobs_are_those_of_the_model(
    engine: ThinkerEngine, oracle: Oracle, tokenizer: Any, options: dict[str, Any]
) -> None:
    """Of its own distribution, whatever the sampling makes of it, and as many alternatives as are asked for."""
    sink = ask(engine, request(SAY, logprobs=5, **options, **FREE))
    entries = [entry for event in sink.events for entry in event.logprobs]
    assert [len(event.logprobs) for event in sink.events] == [event.token_ids.size for event in sink.events]
    expected = logits_of(oracle, sink).log_softmax(-1)
    for row, token_id, entry in zip(expected, sink.ids, entries, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
        likeliest = row.topk(5)
        told = entry["top_logprobs"]
        np.testing.assert_allclose([each["logprob"] for each in told], likeliest.values, atol=1e-3)
        best = next(each for each in told if each["token"] == tokenizer.decode([int(likeliest.indices[0])]))
        assert best["logprob"] == pytest.approx(float(likeliest.values[0]), abs=1e-3)
        own = [each for each in told if each["bytes"] == entry["bytes"]]
        assert bool(own) == (entry["logprob"] >= told[-1]["logprob"])
        assert all(each == {key: entry[key] for key in ("token", "bytes", "logprob")} for each in own)
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert text == tokenizer.decode(sink.ids)


def test_no_alternatives_and_no_logprobs(engine: ThinkerEngine) -> None:
    sink = ask(engine, request(SAY, logprobs=0, **FREE))
    entries = [entry for event in sink.events for entry in event.logprobs]
    assert len(entries) == len(sink.ids)
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in entries)
    assert not any(event.logprobs for event in ask(engine, request(SAY, **FREE)).events)


def test_a_part_of_a_character_is_told_in_bytes(engine: ThinkerEngine, tokenizer: Any) -> None:
    first, second = tokenizer.encode("é", add_special_tokens=False)
    options: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, "logprobs": 1}
    sink = ask(engine, request(SAY, logit_bias={first: 100}, **options))
    (entry,) = [entry for event in sink.events for entry in event.logprobs]
    assert sink.ids == [first] != [second]
    assert (entry["token"], entry["bytes"]) == ("�", ["é".encode()[0]])
    assert entry["logprob"] < -1  # unbiased
    assert "é".encode()[0] not in entry["top_logprobs"][0]["bytes"]


def test_a_special_token_is_told_by_its_name(engine: ThinkerEngine, tokenizer: Any) -> None:
    name = "<|audio_start|>"
    mark = tokenizer.convert_tokens_to_ids(name)
    sink = ask(engine, request(SAY, logit_bias={mark: 100}, max_tokens=2, ignore_eos=True, logprobs=0))
    entries = [entry for event in sink.events for entry in event.logprobs]
    assert [(entry["token"], bytes(entry["bytes"])) for entry in entries] == [(name, name.encode())] * 2
    assert sink.text == ""


def test_logprobs_end_with_the_ids_where_a_stop_string_does(engine: ThinkerEngine, tokenizer: Any) -> None:
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 1} | FREE
    free = ask(engine, request(SAY, **hot))
    at = next(i for i in range(6, len(free.text) - 3) if free.text.find(free.text[i : i + 3]) == i)
    sink = ask(engine, request(SAY, stop=(free.text[at : at + 3],), **hot))
    assert (sink.text, sink.finish_reason) == (free.text[:at], "stop")
    assert [len(event.logprobs) for event in sink.events] == [event.token_ids.size for event in sink.events]
    entries = [entry for event in sink.events for entry in event.logprobs]
    assert [entry["token"] for entry in entries] == [tokenizer.decode([i]) for i in sink.ids]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_biased_ids_must_exist(engine: ThinkerEngine, token_id: int) -> None:
    error = ask(engine, request(SAY, logit_bias={7: 1.0, token_id: 1.0})).error
    assert isinstance(error, InvalidRequestError)
    assert error.field == "logit_bias"
    assert f"got {token_id}" in error.message and "[0, " in error.message


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_transformers_holds_no_answer_to_a_form(transformers_engine: ThinkerEngine, kind: str) -> None:
    wanted: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        wanted["json_schema"] = {"name": "anything", "schema": {}}
    error = ask(transformers_engine, request(SAY, response_format=wanted)).error
    assert isinstance(error, InvalidRequestError)
    assert error.field == "response_format.type"
    assert "engine vllm" in error.message
    assert ask(transformers_engine, request(SAY, response_format={"type": "text"}, max_tokens=1)).error is None
