"""vLLM's engine process, as the thinker wants it. Imports vLLM."""

from __future__ import annotations

from pathlib import Path

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker import last_words
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.vllm_args import engine_args, refused
from triton_omni.thinker.vllm_model import check_layers_can_be_named
from triton_omni.thinker.vllm_plugin import register

_PLAIN_DTYPES = ("bfloat16", "float16")
_LAYERS_TO_DRAFTS = ("eagle3", "dflash", "dspark", "extract_hidden_states")


def start_vllm(model_config: ModelConfig, config: ThinkerConfig, rows_socket: str, words: Path) -> AsyncLLM:
    """Loads the weights in vLLM's engine process, which keeps its last words in ``words``. Raises ConfigError with what
    vLLM says.
    """
    register()  # here too, for an installation whose entry points vLLM cannot see
    if model_config.speaks:
        check_layers_can_be_named()
    args = engine_args(model_config, config, rows_socket)
    try:
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except Exception as error:
        raise refused(error) from error
    _check(vllm_config, speaks=model_config.speaks)
    try:
        with last_words.kept_in(words):
            return AsyncLLM.from_vllm_config(
                vllm_config,
                enable_log_requests=args.enable_log_requests,
                aggregate_engine_logging=args.aggregate_engine_logging,
                disable_log_stats=args.disable_log_stats,
            )
    except Exception as error:
        cause = last_words.read(words) or f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"vLLM does not start, its own lines above say more: {cause.rstrip('.')}. Where it is for want of memory, "
            "lower max_model_len or max_num_seqs, or set vllm_args.gpu_memory_utilization",
            field="engine",
        ) from error


def _check(vllm_config: VllmConfig, *, speaks: bool) -> None:
    """What vLLM takes, and what would then give wrong answers or wrong rows. Raises ConfigError."""
    speculative = vllm_config.speculative_config
    if speaks and speculative is not None and speculative.method in _LAYERS_TO_DRAFTS:
        raise ConfigError(
            f"cannot draft by {speculative.method}: vLLM's model hands its layers' outputs to one reader, and the "
            "talker has them; ngram and others do without",
            field="vllm_args.speculative_config",
        )
    kept, computed = vllm_config.cache_config.cache_dtype, str(vllm_config.model_config.dtype).removeprefix("torch.")
    if current_platform.device_type == "cpu" and kept in _PLAIN_DTYPES and kept != computed:
        raise ConfigError(
            f"must be auto or {computed}, the type that is computed in, got {kept}: on CPU vLLM reads keys and values "
            "of another one wrongly",
            field="vllm_args.kv_cache_dtype",
        )
