"""The thinker engine that a configuration asks for."""

from __future__ import annotations

from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.config import ThinkerConfig


def load_thinker(model_config: ModelConfig, config: ThinkerConfig) -> ThinkerEngine:
    """Load weights and processor and start the engine. "auto" is transformers.

    Raises: CheckpointError, ConfigError.
    """
    from triton_omni.thinker.transformers_engine import TransformersThinker  # torch loads with the engine, not before

    return TransformersThinker(model_config, config)
