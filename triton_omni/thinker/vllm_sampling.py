"""The sampling of a request in vLLM's words, and vLLM's log probabilities in OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from triton_omni.pipeline.stages import TokenLogprob
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.constraint import Constraint
from triton_omni.thinker.logprobs import LogprobWriter


def sampling_params(
    sampling: ThinkerSampling,
    constraint: Constraint | None,
    max_tokens: int,
    end_ids: list[int],
    extra_args: dict[str, Any],
) -> SamplingParams:
    """Ids only: text, and stop strings in it, are found here as with any engine. For one request: vLLM changes it."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        stop_token_ids=end_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        structured_outputs=_structured_outputs(constraint),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args or None,
        skip_clone=True,  # a deep copy takes longer than all else that vLLM does with a new request
    )


def _structured_outputs(constraint: Constraint | None) -> StructuredOutputsParams | None:
    if constraint is None:
        return None
    if constraint.kind == "json":
        return StructuredOutputsParams(json=constraint.text)
    return StructuredOutputsParams(grammar=constraint.text)


def tokens(
    completion: CompletionOutput, num_likeliest: int | None, writer: LogprobWriter
) -> Iterator[tuple[int, TokenLogprob | None]]:
    """The new ids, each with its log probability when the request asked for them."""
    if num_likeliest is None or completion.logprobs is None:
        yield from ((token_id, None) for token_id in completion.token_ids)
        return
    for token_id, known in zip(completion.token_ids, completion.logprobs, strict=True):
        # The sampled token, and the likeliest by rank: it may be one of them, or have a rank behind all of theirs.
        ranked = sorted((each.rank or 0, each_id, each.logprob) for each_id, each in known.items())
        likeliest = [(each_id, logprob) for rank, each_id, logprob in ranked if rank <= num_likeliest]
        yield token_id, writer.entry(token_id, known[token_id].logprob, likeliest)
