"""What vLLM is told of the cache of rows."""

from __future__ import annotations

import warnings

import pytest

pytestmark = pytest.mark.vllm


def test_the_rows_take_no_graphs_from_the_other_layers() -> None:
    """vLLM captures what the layer with the least support allows; its own cache-only layer allows none."""
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.attention.backend import AttentionCGSupport

        from triton_omni.thinker.vllm_rows_cache import RowsBackend
    assert RowsBackend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS
