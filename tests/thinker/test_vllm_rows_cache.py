"""The cache of rows beside vLLM's own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.thinker.support import TIMEOUT_S, Media, ask, request, start_vllm
from triton_omni.model_config import ModelConfig

pytestmark = pytest.mark.vllm


def test_the_rows_take_no_graphs_from_the_other_layers() -> None:
    """vLLM captures what the layer with the least support allows; its own cache-only layer allows none."""
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.attention.backend import AttentionCGSupport

        from triton_omni.thinker.vllm_rows_cache import RowsBackend
    assert RowsBackend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_keep_their_type_where_keys_and_values_are_quantized(
    model_config: ModelConfig, vllm_engine: Any, media: Media
) -> None:
    """Off by what fp8 keys and values change of what attention gives; the same again from the cache."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 keys and values on CPU take AVX-512")
    content = [{"type": "audio", "media": 0}, {"type": "text", "text": "well?"}]

    def rows(engine: Any) -> np.ndarray:
        what = request(content, media=(media.audio,), max_tokens=2, ignore_eos=True, want_rows=True)
        ask(engine, what)
        found = engine.rows(what.request_id, TIMEOUT_S)
        assert found.dtype == "float32"
        return found.rows.view(np.float32)

    quantized = start_vllm(model_config, kv_cache_dtype="fp8")
    try:
        first, cached = rows(quantized), rows(quantized)
    finally:
        quantized.close()
    whole = rows(vllm_engine)
    np.testing.assert_array_equal(first, cached)
    assert 0 < np.linalg.norm(first - whole) < 0.2 * np.linalg.norm(whole)
