from __future__ import annotations

import dataclasses

import pytest
import torch

from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.errors import ConfigError, InvalidRequestError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_half_precision_is_the_gpus_own_and_float32_the_cpus():
    assert Code2WavConfig().torch_dtype(GPU) == torch.float16
    assert Code2WavConfig().torch_dtype(CPU) == torch.float32
    assert Code2WavConfig(dtype="bfloat16").torch_dtype(GPU) == torch.bfloat16
    assert Code2WavConfig(dtype="float64").torch_dtype(GPU) == torch.float64


@pytest.mark.parametrize(("settings", "field"), [({"dtype": "float16"}, "dtype"), ({"cuda_graph": True}, "cuda_graph")])
def test_what_needs_a_gpu_is_refused_on_cpu(settings, field):
    with pytest.raises(ConfigError) as raised:
        Code2WavConfig(**settings).torch_dtype(CPU)
    assert raised.value.field == field
    assert "GPU" in str(raised.value)


def test_graphs_of_plain_pytorch_are_refused():
    with pytest.raises(InvalidRequestError) as raised:
        Code2WavConfig(cuda_graph=True, dtype="float32")
    assert raised.value.field == "cuda_graph"


def test_memory_is_known_before_anything_is_loaded(shape):
    pytest.importorskip("triton")
    from triton_omni.code2wav.buckets import buckets
    from triton_omni.code2wav.memory import MemoryPlan

    plan = MemoryPlan.of(shape, torch.float16, 64, buckets(64, 1600))
    more = MemoryPlan.of(shape, torch.float16, 65, buckets(64, 1600))
    assert more.total - plan.total == plan.slot > 0
    assert MemoryPlan.of(shape, torch.float16, 64, buckets(64, 800)).work < plan.work
    plan.check(plan.total, GPU)
    with pytest.raises(ConfigError, match=r"weights \+ 65 slots x .* = .* but cuda has .* max_step_frames") as raised:
        plan.check(plan.total - 1, GPU)
    assert raised.value.field == "max_step_frames"


def test_memory_counts_what_a_decoder_holds(shape):
    pytest.importorskip("triton")
    from triton_omni.code2wav.buckets import Bucket
    from triton_omni.code2wav.fused import FusedDecoder
    from triton_omni.code2wav.memory import MemoryPlan
    from triton_omni.code2wav.packing import PackedCode2Wav
    from triton_omni.code2wav.random_weights import random_code2wav

    small = dataclasses.replace(shape, layers=1)
    packed = PackedCode2Wav(random_code2wav(small, CPU, slots=1), torch.float16, CPU)
    decoder = FusedDecoder(packed, 4, [Bucket(2, 4)])
    plan = MemoryPlan.of(small, torch.float16, 3, [Bucket(2, 4)])
    assert (plan.weights, 4 * plan.slot) == (packed.nbytes, decoder.state_bytes)
    assert plan.work > decoder.work_bytes
