"""The network, fed with given inputs, computes what transformers computes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.oracle import Oracle
from triton_omni.model_config import ModelConfig
from triton_omni.talker.layers import Rope
from triton_omni.talker.model import SparseMoe
from triton_omni.talker.runner import TalkerRunner
from triton_omni.talker.shape import MoeShape, TalkerShape

pytestmark = pytest.mark.parity
Runner = Callable[..., TalkerRunner]


def test_backbone_in_any_pieces_equals_one_pass_of_transformers(oracle: Oracle, make_runner: Runner) -> None:
    torch.manual_seed(0)
    runner, reference = make_runner(), oracle.model.talker
    tokens, hidden = 90, reference.config.text_config.hidden_size
    rows = torch.randn(tokens, hidden) * 0.3
    positions = torch.randint(0, 40, (3, tokens)).sort(dim=-1).values
    positions[1:, -5:] = positions[:1, -5:]
    with torch.inference_mode():
        expected = reference.model(inputs_embeds=rows[None], position_ids=positions[:, None]).last_hidden_state[0]
        for slot, sizes in enumerate(([90], [30, 1, 59], [70] + [1] * 20)):
            pieces, start = [], 0
            for size in sizes:
                index = torch.tensor([slot])
                cache = runner.slots.cache(index, size, limit=start + size)
                span = slice(start, start + size)
                pieces.append(runner.talker.model(rows[None, span], positions[:, None, span], cache)[0])
                runner.slots.length[slot] += size
                start += size
            torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-5)


def test_predictor_with_cache_equals_transformers_without(oracle: Oracle, make_runner: Runner) -> None:
    torch.manual_seed(1)
    ours, reference = make_runner().talker.code_predictor, oracle.model.talker.code_predictor
    groups, vocab = ours.groups, ours.shape.vocab
    hidden, first = torch.randn(2, 3, ours.shape.hidden)
    forced = torch.randint(0, vocab, (3, groups - 1))
    logits: list[torch.Tensor] = []

    def pick(scores: torch.Tensor, group: int) -> torch.Tensor:
        logits.append(scores)
        return forced[:, group - 1]

    with torch.inference_mode():
        codes = ours(hidden, first, pick)
        embedded = [e(forced[:, i]) for i, e in enumerate(reference.get_input_embeddings())]
        states = reference.model(inputs_embeds=torch.stack([hidden, first, *embedded[:-1]], 1)).last_hidden_state
        expected = [head(states[:, i + 1]) for i, head in enumerate(reference.lm_head)]
    assert torch.equal(codes, forced)
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_equal_transformers(oracle: Oracle, normalise: bool) -> None:
    torch.manual_seed(2)
    reference = oracle.model.talker.model.layers[0].mlp
    config = oracle.model.talker.config.text_config
    shape = MoeShape(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
        normalise,
    )
    ours = SparseMoe(shape, config.hidden_size)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(2, 5, config.hidden_size)
    before, reference.gate.norm_topk_prob = reference.gate.norm_topk_prob, normalise
    with torch.inference_mode():
        expected = reference(x)
        got = ours(x)
    reference.gate.norm_topk_prob = before
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_rope_equals_transformers(oracle: Oracle, make_runner: Runner) -> None:
    shape: Any = make_runner().talker.shape
    positions = torch.randint(0, 5000, (3, 1, 40))
    like = torch.empty(0)
    for ours, theirs, at in (
        (Rope(shape.backbone), oracle.model.talker.model.rotary_emb, positions),
        (Rope(shape.predictor), oracle.model.talker.code_predictor.model.rotary_emb, positions[0]),
    ):
        for got, expected in zip(ours(at), theirs(like, at), strict=True):
            torch.testing.assert_close(got, expected)


def test_shape_reads_published_and_rewritten_rope(model_config: ModelConfig) -> None:
    """The published config.json has rope_theta and rope_scaling where transformers 5 writes rope_parameters."""
    published, rewritten = copy.deepcopy(dict(model_config.raw)), copy.deepcopy(dict(model_config.raw))
    for part in ("text_config", "code_predictor_config"):
        for raw in (published, rewritten):
            section = raw["talker_config"][part]
            rope = {**(section.pop("rope_scaling", None) or {}), **section.pop("rope_parameters", {})}
            theta = section.pop("rope_theta", rope.pop("rope_theta", None))
            if raw is rewritten:
                section["rope_parameters"] = {**rope, "rope_theta": theta}
            else:
                section |= {"rope_scaling": rope or None, "rope_theta": theta}
    shapes = [TalkerShape.read(dataclasses.replace(model_config, raw=raw)) for raw in (published, rewritten)]
    assert shapes[0] == shapes[1] == TalkerShape.read(model_config)
