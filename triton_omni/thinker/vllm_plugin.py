"""Found by vLLM in every process it starts, through the entry point group ``vllm.general_plugins``."""

from __future__ import annotations

ARCHITECTURE = "TritonOmniThinkerForConditionalGeneration"


def register() -> None:
    """Add the thinker under an architecture name of its own; vLLM's own Qwen3-Omni stays as it is."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "triton_omni.thinker.vllm_model:OmniThinker")
