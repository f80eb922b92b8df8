"""Scores equal those of transformers' generate, draws follow them, seeds repeat them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from triton_omni.model_config import ModelConfig
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.sampler import Sampler
from triton_omni.thinker.transformers_model import TransformersModel

CPU = torch.device("cpu")
PROMPT = [5, 7, 5, 90]


@pytest.fixture(scope="module")
def thinker(checkpoint: Path) -> Any:
    return TransformersModel(ModelConfig.load(checkpoint), ThinkerConfig(dtype="float32", device="cpu"))._model


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3, "min_tokens": 4},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ],
)
def test_scores_equal_generate(thinker: Any, options: dict[str, Any]) -> None:
    sampling, end_id = ThinkerSampling(**options), 40
    torch.manual_seed(3)
    named: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        named = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    reference = thinker.generate(
        input_ids=torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=8,
        min_new_tokens=sampling.min_tokens or None,
        eos_token_id=end_id,
        pad_token_id=0,
        repetition_penalty=sampling.repetition_penalty,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **named,
    )
    sampler = Sampler(sampling, PROMPT, 8, {end_id}, CPU)
    for step, (logits, scores) in enumerate(zip(reference.logits, reference.scores, strict=True)):
        torch.testing.assert_close(sampler.scores(logits[0]), scores[0], rtol=0, atol=0)
        sampler.draw(torch.full_like(logits[0], -1e9).index_fill(0, reference.sequences[0, len(PROMPT) + step], 1e9))


def test_draws_follow_the_scores() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    sampler = Sampler(ThinkerSampling(temperature=0.8, top_k=4, seed=1), [], 20_000, set(), CPU)
    counts = torch.bincount(torch.tensor([sampler.draw(logits) for _ in range(20_000)]), minlength=5)
    expected = (logits[:4] / 0.8).softmax(0) * 20_000
    assert counts[4] == 0
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


def test_a_seed_repeats_and_others_differ() -> None:
    logits = torch.zeros(1000)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(ThinkerSampling(temperature=1.0, seed=seed), [], 10, set(), CPU)
        return [sampler.draw(logits) for _ in range(10)]

    assert draws(7) == draws(7)
    assert len({tuple(draws(seed)) for seed in (7, 8, 2**63 - 1, None, None)}) == 5


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.tensor([1.0, 1.001, -50.0])
    sampler = Sampler(ThinkerSampling(temperature=1e-30), [], 50, set(), CPU)
    assert {sampler.draw(logits) for _ in range(50)} == {1}
