"""The samplers' distributions are those of transformers' logits processors, and a draw depends on its own row alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triton_omni.talker.sampler import (
    RowSampling,
    allowed_scores,
    gumbel,
    keep_top,
    residual_scores,
    sample_layer0,
    sample_residual,
)

VOCAB, EOS = 3072, 2150
PARAMETERS = [  # temperature, top_k, top_p, repetition_penalty, min_frames
    (0.9, 50, 1.0, 1.05, 0),
    (1.0, 0, 0.8, 1.0, 0),
    (0.3, 5, 0.5, 1.3, 3),
    (2.0, 0, 1.0, 0.7, 0),
    (0.7, 4000, 0.95, 1.1, 9),
    (1.0, 1, 1.0, 1.0, 0),
]


def rows(parameters: list[tuple[float, int, float, float, int]], seen: torch.Tensor, frame: int = 5) -> RowSampling:
    columns = list(zip(*parameters, strict=True))
    count = len(parameters)
    return RowSampling(
        temperature=torch.tensor(columns[0]),
        top_k=torch.tensor(columns[1]),
        top_p=torch.tensor(columns[2]),
        repetition_penalty=torch.tensor(columns[3]),
        min_frames=torch.tensor(columns[4]),
        seed=torch.arange(count),
        frame=torch.full((count,), frame),
        seen=seen,
    )


def reference(logits: torch.Tensor, said: list[int], parameters: tuple[float, int, float, float, int]) -> torch.Tensor:
    """Probabilities that generate would sample from, built as it builds its processors."""
    temperature, top_k, top_p, penalty, min_frames = parameters
    processors = LogitsProcessorList()
    if penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(MinNewTokensLengthLogitsProcessor(0, min_frames, EOS, device="cpu"))
    processors.append(SuppressTokensLogitsProcessor([i for i in range(VOCAB - 1024, VOCAB) if i != EOS], device="cpu"))
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(torch.tensor([said]), logits[None].clone()).softmax(-1)[0]


def test_the_talkers_distribution_is_transformers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(PARAMETERS), VOCAB) * 3
    logits[:, EOS] = 9.0
    said = [torch.randint(0, 2048, (5,)).tolist() for _ in PARAMETERS]
    for row, codes in enumerate(said):
        codes[0] = int(logits[row, :2048].argmax())
    seen = torch.zeros(len(PARAMETERS), VOCAB, dtype=torch.bool)
    for row, codes in enumerate(said):
        seen[row, codes] = True
    batch = rows(PARAMETERS, seen)
    scores = allowed_scores(logits, batch, EOS) / batch.temperature[:, None]
    ours = keep_top(scores, batch.top_k, batch.top_p).softmax(-1)
    for row, parameters in enumerate(PARAMETERS):
        theirs = reference(logits[row], said[row], parameters)
        assert torch.equal(ours[row] > 0, theirs > 0), parameters
        torch.testing.assert_close(ours[row], theirs, rtol=1e-5, atol=1e-7)


def test_greedy_is_the_best_allowed_code_after_the_penalty() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 2500] = 10.0, 9.8, 20.0
    seen = torch.zeros(2, VOCAB, dtype=torch.bool)
    seen[0, 7] = True
    batch = rows([(0.0, 50, 1.0, 1.05, 0)] * 2, seen)
    for all_greedy in (False, True):  # nothing drawn, or drawn and not used
        batch = dataclasses.replace(batch, all_greedy=all_greedy)
        assert sample_layer0(logits, batch, EOS).tolist() == [8, 7]
        assert torch.equal(sample_residual(logits, batch, 1), logits.argmax(-1))


def test_the_predictors_distribution_is_transformers() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 2048) * torch.tensor([[0.1], [1.0], [3.0], [10.0]])
    scores, codes = residual_scores(logits)
    ours = torch.zeros_like(logits).scatter(-1, codes, scores.softmax(-1))
    processors = LogitsProcessorList([TopKLogitsWarper(50), TopPLogitsWarper(0.8)])
    theirs = processors(torch.zeros(4, 1, dtype=torch.long), logits.clone()).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("who", ["talker", "predictor"])
def test_draws_follow_the_distribution(who: str) -> None:
    torch.manual_seed(3)
    draws = 8_000
    batch = rows([(1.0, 8, 1.0, 1.0, 0)] * draws, torch.zeros(1, VOCAB, dtype=torch.bool).expand(draws, -1))
    if who == "talker":
        logits = torch.full((VOCAB,), -20.0)
        logits[:12] = torch.randn(12)
        expected = reference(logits, [], (1.0, 8, 1.0, 1.0, 0))
        drawn = torch.cat(
            [sample_layer0(logits.expand(len(part.seed), -1), part, EOS) for part in _parts(batch, draws, 1000)]
        )
    else:
        logits = torch.full((2048,), -20.0)
        logits[:12] = torch.randn(12)
        processors = LogitsProcessorList([TopKLogitsWarper(50), TopPLogitsWarper(0.8)])
        expected = processors(torch.zeros(1, 1, dtype=torch.long), logits[None].clone()).softmax(-1)[0]
        drawn = sample_residual(logits.expand(draws, -1), batch, group=3)
    counts = torch.bincount(drawn, minlength=len(expected)).float()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi2 = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum()
    assert chi2 < 40  # 7 degrees of freedom at most: p < 1e-5


def _take(batch: RowSampling, index: slice | torch.Tensor) -> RowSampling:
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "all_greedy"}
    return RowSampling(**{name: tensor[index] for name, tensor in tensors.items()})


def _parts(batch: RowSampling, count: int, size: int) -> list[RowSampling]:
    return [_take(batch, slice(i, i + size)) for i in range(0, count, size)]


def test_a_draw_depends_on_its_own_row_alone() -> None:
    torch.manual_seed(4)
    logits = torch.randn(16, VOCAB)
    batch = rows([(1.0, 0, 1.0, 1.0, 0)] * 16, torch.zeros(16, VOCAB, dtype=torch.bool))
    together = sample_layer0(logits, batch, EOS)
    order = torch.randperm(16)
    assert torch.equal(sample_layer0(logits[order], _take(batch, order), EOS), together[order])
    alone = [sample_layer0(logits[i : i + 1], _parts(batch, 16, 1)[i], EOS) for i in range(16)]
    assert torch.equal(torch.cat(alone), together)


def test_noise_is_gumbel_and_unrelated_between_seeds_frames_groups_and_codes() -> None:
    codes = torch.arange(4096)[None]

    def noise(seed: int, frame: int, group: int) -> torch.Tensor:
        return gumbel(torch.tensor([seed]), torch.tensor([frame]), group, codes)[0].double()

    base = noise(0, 0, 0)
    uniform = torch.exp(-torch.exp(-base)).sort().values
    assert (uniform - (torch.arange(4096) + 0.5) / 4096).abs().max() < 0.03  # Kolmogorov-Smirnov, p < 1e-3
    for other in (noise(1, 0, 0), noise(0, 1, 0), noise(0, 0, 1), noise(2**63 - 1, 4095, 15), base.roll(1)):
        assert torch.corrcoef(torch.stack([base, other]))[0, 1].abs() < 0.06
    assert torch.equal(noise(0, 0, 0), base)
