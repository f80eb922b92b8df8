"""The first batches of a new vLLM engine, before anybody waits for them. Imports vLLM."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection

from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)
# Tokens of one step. Beyond vLLM's CUDA graphs, up to its largest batch, which it profiles, kernels for experts are
# chosen by such sizes, and compiled when they are first chosen, once for even and once for odd ones (a product of them
# is then a multiple of 16 or not): all open requests wait up to 2.7 s for it.
_STEP_TOKENS = (
    16,
    64,
    *(129, 256, 257, 513),  # for graphs that end early, as vLLM's own do
    *(size + odd for size in (768, 1024, 1536, 2048, 3072, 4096) for odd in (0, 1)),
)
_SHORT_TOKENS = 16
_ANSWER_TOKENS = 2
_GREEDY = SamplingParams(
    temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)
_SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    repetition_penalty=1.1,
    max_tokens=_ANSWER_TOKENS,
    ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
_CONSTRAINED = SamplingParams(
    temperature=0,
    max_tokens=_ANSWER_TOKENS,
    structured_outputs=StructuredOutputsParams(json='{"type": "object"}'),
    output_kind=RequestOutputKind.FINAL_ONLY,
)


def takes_long() -> bool:
    """Whether first requests wait for compilers and imports long enough to hide that in the load: not on CPU."""
    return bool(current_platform.device_type != "cpu")


async def warm_up(llm: AsyncLLM, special_ids: Collection[int]) -> None:
    """A prompt of each of _STEP_TOKENS, then as many short ones as run at once, sampled, then one whose answer is held
    to a grammar: the first such request would wait for 2.7 s of imports. On CPU, where nothing is compiled, one short
    prompt, greedy and sampled. Leaves nothing in the prefix cache.
    """
    config = llm.vllm_config
    longest = min(config.model_config.max_model_len - _ANSWER_TOKENS, config.scheduler_config.max_num_batched_tokens)
    short, places = min(_SHORT_TOKENS, longest), config.scheduler_config.max_num_seqs
    sizes = [size for size in _STEP_TOKENS if size <= longest]
    if not takes_long():
        sizes, places = [short], 1
    plain = itertools.cycle(i for i in range(config.model_config.get_vocab_size()) if i not in special_ids)
    for size in sizes:
        await _answer(llm, list(itertools.islice(plain, size)), _GREEDY)
    prompts = [list(itertools.islice(plain, short)) for _ in range(places)]
    await asyncio.gather(*(_answer(llm, prompt, _SAMPLED) for prompt in prompts))
    if takes_long():
        await _answer_to_grammar(llm, prompts[0])
    await llm.reset_prefix_cache()


async def _answer_to_grammar(llm: AsyncLLM, token_ids: list[int]) -> None:
    """What fails here fails with the request that needs it, and says why; all others can do without."""
    try:
        await _answer(llm, token_ids, _CONSTRAINED)
    except Exception:
        log.warning("the warm-up got no answer held to a grammar", exc_info=True)


async def _answer(llm: AsyncLLM, token_ids: list[int], params: SamplingParams) -> None:
    async for _ in llm.generate(tokens_input(token_ids), params, f"warm-up-{id(token_ids)}"):
        pass
