"""The thinker's settings: what is accepted, and what the error says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from triton_omni.errors import CheckpointError, ConfigError, InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.options import from_mapping
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker
from triton_omni.thinker.limits import context_tokens, eos_token_ids, max_answer_tokens


@pytest.mark.parametrize(
    ("values", "field", "told"),
    [
        ({"engine": "magic"}, "engine", "auto, vllm, transformers"),
        ({"dtype": "int8"}, "dtype", "bfloat16"),
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1"),
        ({"max_num_seq": 4}, "max_num_seq", "max_num_seqs"),
        ({"max_audio_s": "long"}, "max_audio_s", "a number"),
        ({"max_model_len": -1}, "max_model_len", "at least 0"),
        ({"video_fps": 0.0}, "video_fps", "(0, 30]"),
    ],
)
def test_wrong_settings_name_themselves(values: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        from_mapping(ThinkerConfig, values)
    assert raised.value.field == field
    assert told in raised.value.message


@pytest.mark.parametrize(
    ("changes", "field"), [({"device": "abacus"}, "device"), ({"max_model_len": 10**9}, "max_model_len")]
)
def test_settings_that_do_not_fit_stop_the_load(model_config: ModelConfig, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_thinker(model_config, ThinkerConfig(engine="transformers", **changes))
    assert raised.value.field == field


def test_a_frame_rate_between_positions_stops_the_load(model_config: ModelConfig) -> None:
    with pytest.raises(ConfigError) as raised:
        load_thinker(model_config, ThinkerConfig(engine="transformers", video_fps=3.3))
    assert raised.value.field == "video_fps"


def test_answer_length() -> None:
    assert max_answer_tokens(ThinkerSampling(max_tokens=5), 90, 100, 50) == 5
    assert max_answer_tokens(ThinkerSampling(max_tokens=50), 90, 100, 50) == 10
    assert max_answer_tokens(ThinkerSampling(), 90, 1000, 50) == 50
    assert max_answer_tokens(ThinkerSampling(), 90, 100, None) == 10


def test_end_ids_and_context(model_config: ModelConfig) -> None:
    assert model_config.raw["im_end_token_id"] in eos_token_ids(model_config)
    assert context_tokens(model_config, 0) == model_config.context_tokens
    assert context_tokens(model_config, 64) == 64
    with pytest.raises(CheckpointError, match="im_end_token_id"):
        eos_token_ids(ModelConfig(model_config.path, {}, {}))
