"""A cache beside those of keys and values: a layer's output of every token that they hold. Imports vLLM."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionLayer,
    CacheOnlyAttentionMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

_NAME = "omni_rows"


def layer_name(num_layers: int) -> str:
    """vLLM sorts caches by the one number in their name: this one lies behind those of ``num_layers`` layers."""
    return f"{_NAME}.{num_layers}"


def is_rows_layer(name: str) -> bool:
    return name.startswith(_NAME)


class _RowsMetadataBuilder(CacheOnlyAttentionMetadataBuilder):  # type: ignore[misc]
    """The write is a scatter by the step's slots, which lie where they lay when a graph was captured. Upstream names no
    support, and one layer without it takes the full CUDA graphs of decoding from all the others.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class RowsBackend(CacheOnlyAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_name() -> str:
        return "OMNI_ROWS"

    @staticmethod
    def get_builder_cls() -> type[_RowsMetadataBuilder]:
        return _RowsMetadataBuilder


class RowsCache(CacheOnlyAttentionLayer):  # type: ignore[misc]
    """Rows [T, 1, H] in, nothing out.

    Upstream's spec would make a group of its own, whose blocks are as large as those of all decoder layers together:
    two thirds of the cache's memory went to it. As full attention without values it shares the layers' blocks.
    """

    def __init__(self, *, cache_config: Any, **options: Any) -> None:
        # Rows have the model's type also where keys and values are quantized (``kv_cache_dtype: fp8``).
        cache_config = copy.copy(cache_config)
        cache_config.cache_dtype = "auto"
        super().__init__(cache_config=cache_config, **options)
        self.attn_backend = RowsBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            head_size_v=0,
            dtype=self.kv_cache_torch_dtype,
        )
