"""Found by vLLM in every process it starts, through the entry point group ``vllm.general_plugins``."""

from __future__ import annotations

from triton_omni.lifetime import end_with_starter

ARCHITECTURE = "TritonOmniThinkerForConditionalGeneration"
RANDOM_WEIGHTS = "triton_omni_random"  # a load format


def register() -> None:
    """Add the thinker under an architecture name of its own; vLLM's own Qwen3-Omni stays as it is. The processes that
    vLLM starts outlive one that is killed, with their GPU memory: they are made to end with it. (A forked one, as vLLM
    starts on GPUs, has loaded its plugins before it was: model and connector do this as well.)
    """
    end_with_starter()
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "triton_omni.thinker.vllm_model:OmniThinker")
        from vllm.model_executor.model_loader import register_model_loader

        from triton_omni.thinker.vllm_random_weights import RandomWeightsLoader

        register_model_loader(RANDOM_WEIGHTS)(RandomWeightsLoader)
