"""Picks one request's next token. A row of its own, so no neighbour can change what it draws."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triton_omni.sampling import ThinkerSampling

GREEDY_BELOW = 1e-5  # a temperature that would push float32 scores out of range


class Sampler:
    """vLLM's steps in vLLM's order, with transformers' processors where it has them, on float32 logits of one row.

    Logit bias, suppression of ``end_ids`` for the first ``min_tokens``, penalties (repetition over prompt and answer,
    frequency and presence over the answer; also when greedy), temperature, min-p, top-k, top-p; then argmax, or a draw
    from the request's own generator.
    """

    def __init__(
        self,
        sampling: ThinkerSampling,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        end_ids: Collection[int],
        device: torch.device,
    ) -> None:
        self._min_tokens = sampling.min_tokens
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.long, device=device)
        self._biased_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=device)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self._frequency_penalty, self._presence_penalty = sampling.frequency_penalty, sampling.presence_penalty
        self._repetition, self._warpers = _processors(sampling)
        self._greedy = sampling.temperature < GREEDY_BELOW
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._prompt_tokens = len(prompt_token_ids)
        self._ids = torch.empty(self._prompt_tokens + max_tokens, dtype=torch.long, device=device)
        self._ids[: self._prompt_tokens] = torch.as_tensor(prompt_token_ids)
        self._num_drawn = 0

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed float32 scores [V] of the model's ``logits`` [V]."""
        ids = self._ids[None, : self._prompt_tokens + self._num_drawn]
        row = logits.float().unsqueeze(0)  # [1, V]
        if self._biased_ids.numel():
            row = row.index_add(1, self._biased_ids, self._biases[None])
        if self._num_drawn < self._min_tokens:
            row = row.index_fill(1, self._end_ids, float("-inf"))
        row = self._repetition(ids, row)
        if self._frequency_penalty or self._presence_penalty:
            counts = ids[0, self._prompt_tokens :].bincount(minlength=row.shape[1])
            row = row - self._frequency_penalty * counts - self._presence_penalty * (counts > 0)
        scores: torch.Tensor = self._warpers(ids, row)
        return scores[0]

    def draw(self, logits: torch.Tensor) -> int:
        """The next id, remembered for the penalties."""
        scores = self.scores(logits)
        if self._greedy:
            drawn = scores.argmax()
        else:
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[0]
        self._ids[self._prompt_tokens + self._num_drawn] = drawn
        self._num_drawn += 1
        return int(drawn)


def _processors(sampling: ThinkerSampling) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """The repetition penalty, and what only a draw needs."""
    penalty, warpers = LogitsProcessorList(), LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        penalty.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature < GREEDY_BELOW:
        return penalty, warpers
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return penalty, warpers
