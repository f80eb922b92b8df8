"""The positions vLLM's subclass gives are transformers'; vLLM's own still are not."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.thinker.support import Media, request
from tests.thinker.test_parity import AUDIO, CASES, IMAGE, SAY, VIDEO, user
from triton_omni.model_config import ModelConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.mrope import MRope
from triton_omni.thinker.prompt import EncodedPrompt, PromptBuilder

pytestmark = pytest.mark.vllm
WITH_SOUND = {
    "sound": [user(VIDEO, SAY)],
    "sound, then audio": [user(VIDEO, SAY), user(AUDIO)],
    "audio, image, sound": [user(AUDIO, IMAGE), user(VIDEO, SAY)],
}


@pytest.fixture(scope="module")
def vllm() -> Any:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.thinker import vllm_model, vllm_prompt
    return SimpleNamespace(model=vllm_model, prompt=vllm_prompt)


@pytest.fixture(scope="module")
def builder(model_config: ModelConfig) -> PromptBuilder:
    return PromptBuilder(model_config, ThinkerConfig())


def encode(builder: PromptBuilder, media: Media, messages: Any, sound: bool) -> EncodedPrompt:
    files = (media.audio, media.image, media.video)
    return builder.build(request(None, messages=messages, media=files, use_audio_in_video=sound))


def features(vllm: Any, encoded: EncodedPrompt, mrope: MRope) -> list[Any]:
    """As vLLM's worker gets them."""
    given = vllm.prompt.to_vllm(encoded, mrope).engine_input
    return [
        SimpleNamespace(modality=modality, data=item, mm_position=place)
        for modality, items in given.get("mm_kwargs", {}).items()
        for item, place in zip(items, given["mm_placeholders"][modality], strict=True)
    ]


@pytest.mark.parametrize("case", [*CASES, *WITH_SOUND])
def test_positions_are_transformers_own(
    case: str, vllm: Any, builder: PromptBuilder, model_config: ModelConfig, media: Media, transformers_engine: Any
) -> None:
    encoded = encode(builder, media, (CASES | WITH_SOUND)[case], case in WITH_SOUND)
    expected = transformers_engine._model.place(encoded).positions.numpy()  # get_rope_index
    mrope = MRope.of(model_config.thinker)
    model = SimpleNamespace(_mrope=mrope)
    got, delta = vllm.model.OmniThinker.get_mrope_input_positions(
        model, encoded.token_ids.tolist(), features(vllm, encoded, mrope)
    )
    np.testing.assert_array_equal(got.numpy(), expected)
    assert delta == expected.max() + 1 - len(encoded.token_ids)


@pytest.mark.parametrize("case", ["image", "video"])
def test_vllm_still_counts_one_late(
    case: str, vllm: Any, builder: PromptBuilder, model_config: ModelConfig, media: Media
) -> None:
    """Fails when vLLM has mended it: then its own positions will do."""
    from transformers import Qwen3OmniMoeConfig

    encoded = encode(builder, media, CASES[case], False)
    mrope = MRope.of(model_config.thinker)
    seen = features(vllm, encoded, mrope)
    config = Qwen3OmniMoeConfig.from_pretrained(model_config.path).thinker_config
    base = vllm.model.upstream.Qwen3OmniMoeThinkerForConditionalGeneration
    model = SimpleNamespace(config=config)
    for name in ("iter_mm_features", "_get_audio_for_video_mapping", "_compute_audio_token_count"):
        setattr(model, name, getattr(base, name).__get__(model))
    ours, _ = vllm.model.OmniThinker.get_mrope_input_positions(
        SimpleNamespace(_mrope=mrope), encoded.token_ids.tolist(), seen
    )
    theirs, _ = base.get_mrope_input_positions(model, encoded.token_ids.tolist(), seen)
    assert not np.array_equal(ours.numpy(), theirs.numpy())


def test_pads_without_a_grid_are_an_error(model_config: ModelConfig) -> None:
    mrope = MRope.of(model_config.thinker)
    with pytest.raises(ValueError, match="do not fit"):
        mrope.positions([1, mrope.image_token_id, 2], [], [])
    with pytest.raises(ValueError, match="do not fit"):
        mrope.positions([1, mrope.image_token_id, 2], [(1, 4, 4)], [])


def test_sound_is_part_of_what_a_video_is_known_by(
    vllm: Any, builder: PromptBuilder, model_config: ModelConfig, media: Media
) -> None:
    """vLLM's prefix cache knows a block inside a video by the video alone."""
    mrope = MRope.of(model_config.thinker)
    encoded = encode(builder, media, WITH_SOUND["sound"], True)
    first = vllm.prompt.to_vllm(encoded, mrope).engine_input["mm_hashes"]
    encoded.features["input_features"][0, 0, 0] += 1
    second = vllm.prompt.to_vllm(encoded, mrope).engine_input["mm_hashes"]
    assert first["audio"] != second["audio"]
    assert first["video"] != second["video"]
