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
from triton_omni.talker.factory import load_runner
from triton_omni.talker.shape import TalkerShape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sessions": 0}, "at least 1, got 0"),
        ({"max_context": -1}, "at least 1, got -1"),
        ({"prefill_chunk": 0}, "at least 1, got 0"),
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TalkerConfig(**options)
    assert caught.value.field == f"talker.{next(iter(options))}"


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
