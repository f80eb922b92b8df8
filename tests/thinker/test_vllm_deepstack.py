"""What one step has of DeepStack features never reaches the tokens of the next."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm
HIDDEN, LEVELS, MOST_TOKENS = 4, 2, 6
IMAGE, AUDIO, TEXT = 7, 8, 1


class _Embedding(torch.nn.Module):
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), HIDDEN)


def thinker() -> Any:
    """As much of the model as comes before its layers."""
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.thinker.vllm_model import OmniThinker

    model = OmniThinker.__new__(OmniThinker)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(audio_token_id=AUDIO, image_token_id=IMAGE, video_token_id=9)
    model.language_model = _Embedding()
    model.deepstack_num_level = LEVELS
    model.deepstack_input_embeds = [torch.zeros(MOST_TOKENS, HIDDEN) for _ in range(LEVELS)]
    model.deepstack_input_embeds_num_tokens = 0
    return model


def step(model: Any, *token_ids: int) -> list[torch.Tensor]:
    """Everything of a step that a replay of a full CUDA graph does not do; the features that the graph would add."""
    ids = torch.tensor(token_ids)
    pictures = int((ids == IMAGE).sum())
    embeddings = [torch.ones(pictures, HIDDEN * (1 + LEVELS))] if pictures else None
    model.embed_input_ids(ids, embeddings, is_multimodal=(ids == IMAGE) | (ids == AUDIO))
    return [level[: len(ids)].clone() for level in model.deepstack_input_embeds]


@pytest.mark.parametrize("after", [(TEXT, TEXT, TEXT, TEXT), (AUDIO, TEXT), (TEXT, IMAGE)])
def test_a_step_adds_the_features_of_its_own_pictures_alone(after: tuple[int, ...]) -> None:
    model = thinker()
    for level in step(model, TEXT, IMAGE, IMAGE):
        assert level.sum(-1).tolist() == [0, HIDDEN, HIDDEN]
    for level in step(model, *after):
        assert level.sum(-1).tolist() == [HIDDEN * (token == IMAGE) for token in after]
    for level in step(model, *[TEXT] * MOST_TOKENS):
        assert not level.any()
