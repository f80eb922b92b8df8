"""The load format for a model without its weights, on layers as vLLM makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]
WIDTH = 256


@pytest.fixture
def online() -> type[torch.nn.Module]:
    """A linear layer whose weight has no memory before it is loaded, and is quantized then."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    class Halved(QuantizeMethodBase):  # type: ignore[misc]
        uses_meta_device = True

        def create_weights(self, layer: torch.nn.Module, *sizes: int, **attributes: object) -> None:
            layer.weight = torch.nn.Parameter(torch.empty(sizes, device="meta"), requires_grad=False)
            initialize_online_processing(layer)

        def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.weight)

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight = torch.nn.Parameter(layer.weight.half(), requires_grad=False)

    class Online(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_method = Halved()
            self.quant_method.create_weights(self, WIDTH, WIDTH)

    return Online


def loaded(*layers: torch.nn.Module) -> Any:
    from vllm.config.load import LoadConfig

    from triton_omni.thinker.vllm_random_weights import RandomWeightsLoader

    model = torch.nn.Sequential(*layers)
    RandomWeightsLoader(LoadConfig()).load_weights(model, None)
    return model


def test_a_layer_that_is_quantized_as_it_loads_gets_weights_before(online: type[torch.nn.Module]) -> None:
    quantized, plain, norm = loaded(online(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH))
    assert quantized.weight.dtype == torch.float16 and not quantized.weight.is_meta
    for weight in quantized.weight.float(), plain.weight:
        assert weight.std().item() == pytest.approx(0.02, rel=0.05) and abs(weight.mean()) < 0.001
    assert not torch.equal(quantized.weight.float(), plain.weight.half().float())
    assert norm.weight.eq(1).all() and norm.bias.eq(0).all() and plain.bias.eq(0).all()


def test_the_same_weights_each_time(online: type[torch.nn.Module]) -> None:
    one, other = (loaded(online(), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    assert torch.equal(one[0].weight, other[0].weight) and torch.equal(one[1].weight, other[1].weight)
