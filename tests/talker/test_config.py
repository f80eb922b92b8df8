"""Settings and checkpoints that cannot work are refused at load, by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_omni.errors import CheckpointError, ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.factory import load_runner, wants_graphs
from triton_omni.talker.memory import MemoryPlan
from triton_omni.talker.shape import TalkerShape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sessions": 0}, "at least 1, got 0"),
        ({"max_context": -1}, "at least 1, got -1"),
        ({"prefill_chunk": 0}, "at least 1, got 0"),
        ({"prefill_chunks_per_step": 0}, "at least 1, got 0"),
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
        ({"buckets": (1, 8), "max_sessions": 9}, r"the largest at least max_sessions 9, got \(1, 8\)"),
        ({"buckets": (0, 64)}, r"at least 1, .* got \(0, 64\)"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TalkerConfig(**options)
    assert caught.value.field == f"talker.{next(iter(options))}"


def test_buckets_reach_as_far_as_sessions_need() -> None:
    assert TalkerConfig(max_sessions=1).row_buckets() == (1,)
    assert TalkerConfig(max_sessions=20).row_buckets() == (1, 2, 4, 8, 16, 20)
    assert TalkerConfig(max_sessions=64).row_buckets() == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert TalkerConfig(max_sessions=6, buckets=(8, 4, 8)).row_buckets() == (4, 8)


CUDA = torch.device("cuda")


def test_graphs_run_on_a_gpu_and_say_what_they_lack(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = TalkerShape.read(model_config)
    assert not wants_graphs(shape, TalkerConfig(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="needs a CUDA device, and the talker runs on cpu") as caught:
        load_runner(model_config, TalkerConfig(cuda_graph=True, device="cpu"))
    assert caught.value.field == "talker.cuda_graph"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert wants_graphs(shape, TalkerConfig(), CUDA) and wants_graphs(shape, TalkerConfig(cuda_graph=True), CUDA)
    assert not wants_graphs(shape, TalkerConfig(cuda_graph=False), CUDA)
    with pytest.raises(ConfigError, match="at most 256 with cuda_graph, got 300") as caught:
        wants_graphs(shape, TalkerConfig(prefill_chunk=300), CUDA)
    assert caught.value.field == "talker.prefill_chunk"
    for what, change in (
        ("text_config.attention_bias false", {"attention_bias": True}),
        ("head_dim that is a power of 2 from 32 on, and got 48", {"head_dim": 48}),
        ("one hidden_size, and got 96 and", {"hidden": 96}),
    ):
        other = dataclasses.replace(shape, backbone=dataclasses.replace(shape.backbone, **change))
        assert not wants_graphs(other, TalkerConfig(), CUDA)
        with pytest.raises(ConfigError, match=what):
            wants_graphs(other, TalkerConfig(cuda_graph=True), CUDA)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton"):
        wants_graphs(shape, TalkerConfig(cuda_graph=True), CUDA)


def test_memory_is_counted_before_anything_is_loaded(model_config: ModelConfig) -> None:
    shape = TalkerShape.read(model_config)
    config = TalkerConfig(max_sessions=8, max_context=1024, dtype="float32")
    plan = MemoryPlan.of(shape, config, torch.float32, graphed=True)
    runner: Any = load_runner(model_config, config)
    assert (plan.sessions + 1) * plan.slot == runner.slots.kv.nbytes + runner.slots.seen.nbytes
    tables = runner.talker.text_table.nbytes + shape.max_positions * shape.backbone.head_dim * 4
    # the codec table's rows are the embeddings' own: one copy
    assert plan.weights == sum(p.nbytes for p in runner.talker.parameters()) + tables
    plan.check(plan.total, CUDA)
    with pytest.raises(
        ConfigError, match=r"9 slots x .* = .*, but cuda has .* free: max_sessions 7 would fit"
    ) as caught:
        plan.check(plan.total - 1, CUDA)
    assert caught.value.field == "talker.max_sessions"
    with pytest.raises(ConfigError, match="not even one session fits"):
        plan.check(plan.weights, CUDA)


@pytest.mark.parametrize("device", ["tpu9", "cuda:99"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        TalkerConfig(device=device).torch_device()


def test_dtype_follows_the_device_unless_given() -> None:
    assert TalkerConfig().torch_dtype(torch.device("cpu")) is torch.float32
    assert TalkerConfig().torch_dtype(torch.device("cuda")) is torch.bfloat16
    assert TalkerConfig(dtype="float16").torch_dtype(torch.device("cpu")) is torch.float16


def test_context_longer_than_the_checkpoint_allows(model_config: ModelConfig) -> None:
    longest = TalkerShape.read(model_config).max_positions
    with pytest.raises(ConfigError, match=f"at most .* {longest}, got {longest + 1}"):
        load_runner(model_config, TalkerConfig(max_context=longest + 1))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("no talker", lambda raw: raw.update(enable_audio_output=False)),
        ("'codec_bos_id'", lambda raw: raw["talker_config"].pop("codec_bos_id")),
        ("hidden_act", lambda raw: raw["talker_config"]["text_config"].update(hidden_act="gelu")),
        ("sliding_window", lambda raw: raw["talker_config"]["code_predictor_config"].update(sliding_window=8)),
        ("rope_type", lambda raw: raw["talker_config"]["text_config"].update(rope_scaling={"rope_type": "yarn"})),
        ("talker.codec_head.weight", lambda raw: raw["talker_config"]["text_config"].update(vocab_size=3000)),
    ],
)
def test_checkpoints_that_do_not_fit(model_config: ModelConfig, message: str, change: Change) -> None:
    raw = copy.deepcopy(dict(model_config.raw))
    change(raw)
    with pytest.raises(CheckpointError, match=message):
        load_runner(dataclasses.replace(model_config, raw=raw), TalkerConfig(max_sessions=1, max_context=64))


def test_bfloat16_speaks(model_config: ModelConfig) -> None:
    config = TalkerConfig(max_sessions=1, max_context=64, dtype="bfloat16")
    runner = load_runner(model_config, config)
    groups = runner.talker.shape.groups
    codes = [runner.decode([0], [5], limit=i + 1).read() for i in range(3)]
    assert runner.slots.kv.dtype is torch.bfloat16 and [c.shape for c in codes] == [(1, groups)] * 3
