"""The first batches of a new vLLM engine, before anybody waits for them. Imports vLLM."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection

from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

# Tokens of one step. Between vLLM's CUDA graphs, which end at 512, and its largest batch, which it profiles, kernels
# for experts are chosen by such sizes, and compiled when they are first chosen, once for even and once for odd ones (a
# product of them is then a multiple of 16 or not): all open requests wait up to 2.7 s for it.
_STEP_TOKENS = (16, 64, 256, *(size + odd for size in (768, 1024, 1536, 2048, 3072, 4096) for odd in (0, 1)))
_SHORT_TOKENS = 16
_GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
_SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    repetition_penalty=1.1,
    max_tokens=2,
    ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


async def warm_up(llm: AsyncLLM, special_ids: Collection[int]) -> None:
    """A prompt of each of _STEP_TOKENS (the first alone on CPU, where nothing is compiled), then as many short ones as
    run at once, sampled. Leaves nothing in the prefix cache.
    """
    config = llm.vllm_config
    longest = min(config.model_config.max_model_len - 2, config.scheduler_config.max_num_batched_tokens)
    sizes = _STEP_TOKENS[:1] if current_platform.device_type == "cpu" else _STEP_TOKENS
    plain = itertools.cycle(i for i in range(config.model_config.get_vocab_size()) if i not in special_ids)
    for size in sizes:
        if size <= longest:
            await _answer(llm, list(itertools.islice(plain, size)), _GREEDY)
    short = [list(itertools.islice(plain, _SHORT_TOKENS)) for _ in range(config.scheduler_config.max_num_seqs)]
    await asyncio.gather(*(_answer(llm, ids, _SAMPLED) for ids in short[: None if len(sizes) > 1 else 1]))
    await llm.reset_prefix_cache()


async def _answer(llm: AsyncLLM, token_ids: list[int], params: SamplingParams) -> None:
    async for _ in llm.generate(tokens_input(token_ids), params, f"warm-up-{id(token_ids)}"):
        pass
