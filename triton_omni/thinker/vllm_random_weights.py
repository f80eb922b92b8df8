"""vLLM's load format for a model without its weights: as ``dummy``, but of the usual spread. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

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
        layer: Any
        for layer in model.modules():
            info = get_layerwise_info(layer)
            # One that vLLM quantizes as it loads (``quantization: fp8``) has no memory for its weights before.
            quantized = info.can_load()
            if quantized:
                materialize_layer(layer, info)
            for name, parameter in layer.named_parameters(recurse=False):
                _draw(name, parameter, generators)
            if quantized:
                layer.quant_method.process_weights_after_loading(layer)
                info.reset()


def _draw(name: str, parameter: torch.Tensor, generators: dict[torch.device, torch.Generator]) -> None:
    if not parameter.is_floating_point():
        return
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1)
    else:
        device = parameter.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(_SEED))
        parameter.normal_(0, _SPREAD, generator=generator)
