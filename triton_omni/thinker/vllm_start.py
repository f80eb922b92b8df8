"""vLLM's engine process, as the thinker wants it. Imports vLLM."""

from __future__ import annotations

from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.vllm_args import engine_args
from triton_omni.thinker.vllm_model import check_layers_can_be_named
from triton_omni.thinker.vllm_plugin import register


def start_vllm(model_config: ModelConfig, config: ThinkerConfig, rows_socket: str) -> AsyncLLM:
    """Loads the weights in vLLM's engine process. Raises ConfigError with what vLLM says."""
    register()  # here too, for an installation whose entry points vLLM cannot see
    if model_config.speaks:
        check_layers_can_be_named()
    args = engine_args(model_config, config, rows_socket)
    try:
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"are refused by vLLM: {error}", field="vllm_args") from error
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=args.disable_log_stats)
    except Exception as error:
        raise ConfigError(
            f"vLLM does not start: {type(error).__name__}: {error} Its own lines above name the cause; where it is "
            "memory, lower max_model_len or max_num_seqs, or set vllm_args.gpu_memory_utilization",
            field="engine",
        ) from error
