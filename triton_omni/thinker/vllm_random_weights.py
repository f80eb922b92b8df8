"""vLLM's load format for a model without its weights: as ``dummy``, but of the usual spread. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_SPREAD = 0.02  # the reference's initializer_range
_SEED = 0


class RandomWeightsLoader(BaseModelLoader):  # type: ignore[misc]
    """Norms are 1, biases 0, all else is normally distributed: activations, and with them the experts that tokens
    choose, spread as a trained model's do. ``dummy`` draws all of it within 0.001 of 0.
    """

    def download_model(self, model_config: Any) -> None:
        pass

    @torch.no_grad()
    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1)
            else:
                device = parameter.device
                generator = generators.setdefault(device, torch.Generator(device).manual_seed(_SEED))
                parameter.normal_(0, _SPREAD, generator=generator)
