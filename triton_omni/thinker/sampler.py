"""Picks one request's next token. A row of its own, so no neighbour can change what it draws."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triton_omni.sampling import ThinkerSampling

GREEDY_BELOW = 1e-5  # a temperature that would push float32 scores out of range


class Sampler:
    """transformers' processors in ``generate``'s order, on float32 logits of one row.

    Repetition penalty (over prompt and answer, also when greedy), suppression of ``end_ids`` for the first
    ``min_tokens``, temperature, top-k, top-p; then argmax, or a draw from the request's own generator.
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
        self._processors = _processors(sampling)
        self._greedy = sampling.temperature < GREEDY_BELOW
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        prompt_tokens = len(prompt_token_ids)
        self._ids = torch.empty(prompt_tokens + max_tokens, dtype=torch.long, device=device)
        self._ids[:prompt_tokens] = torch.as_tensor(prompt_token_ids)
        self._num_ids = prompt_tokens
        self._num_drawn = 0

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed float32 scores [V] of the model's ``logits`` [V]."""
        row = logits.float().unsqueeze(0)  # [1, V]
        for processor in self._processors[0]:
            row = processor(self._ids[None, : self._num_ids], row)
        if self._num_drawn < self._min_tokens:
            row = row.index_fill(1, self._end_ids, float("-inf"))
        for processor in self._processors[1]:
            row = processor(self._ids[None, : self._num_ids], row)
        return row[0]

    def draw(self, logits: torch.Tensor) -> int:
        """The next id, remembered for the penalty."""
        scores = self.scores(logits)
        if self._greedy:
            drawn = scores.argmax()
        else:
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[0]
        self._ids[self._num_ids] = drawn
        self._num_ids += 1
        self._num_drawn += 1
        return int(drawn)


def _processors(sampling: ThinkerSampling) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Before and after the suppression of end ids."""
    before: list[LogitsProcessor] = []
    after: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1.0:
        before.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    samples = sampling.temperature >= GREEDY_BELOW
    if samples and sampling.temperature != 1.0:
        after.append(TemperatureLogitsWarper(sampling.temperature))
    if samples and sampling.top_k:
        after.append(TopKLogitsWarper(sampling.top_k))
    if samples and sampling.top_p < 1.0:
        after.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList(before), LogitsProcessorList(after)
