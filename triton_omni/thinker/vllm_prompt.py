"""An encoded prompt as vLLM takes it: features per medium, what identifies them, where their pads lie. Imports vLLM.

Prompts are made by the checkpoint's processor as for any engine; vLLM's own processor counts audio in other ways
and pairs sound and video by order alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import BatchFeature
from vllm.inputs.engine import mm_input, tokens_input
from vllm.model_executor.models.qwen2_5_omni_thinker import create_qwen2_5_omni_thinker_field_factory
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import Int32
from triton_omni.thinker.mrope import Grid, MRope
from triton_omni.thinker.prompt import EncodedPrompt


@dataclasses.dataclass(frozen=True, slots=True)
class VllmPrompt:
    """``positions`` int32 [3, P]; ``num_media``: how many positions are audio, image or video."""

    token_ids: Int32
    positions: Int32
    num_media: int
    engine_input: Any


def to_vllm(encoded: EncodedPrompt, mrope: MRope) -> VllmPrompt:
    """CPU work: may run in any thread."""
    ids, features = encoded.token_ids, encoded.features
    if not encoded.has_media:
        counted = np.empty((3, len(ids)), np.int32)
        counted[:] = np.arange(len(ids), dtype=np.int32)  # np.tile takes five times as long
        return VllmPrompt(ids, counted, 0, tokens_input(ids.tolist()))
    positions = mrope.positions(ids, _grids(features, "image"), _videos(features))
    num_media = int(np.isin(ids, mrope.media_ids).sum())
    items = MultiModalKwargsItems.from_hf_inputs(
        BatchFeature(_renamed(features, encoded.use_audio_in_video)),
        create_qwen2_5_omni_thinker_field_factory(mrope.spatial_merge_size)(_renamed(features, False)),
    )
    places = _places(ids, mrope)
    hashes = {modality: [_hash(item) for item in items[modality]] for modality in items}
    _join_interleaved(hashes, places)
    engine_input = mm_input(ids.tolist(), items, hashes, places)
    return VllmPrompt(ids, positions, num_media, engine_input)


def check_media(prompt: VllmPrompt, limit_of: Callable[[str], int]) -> None:
    """Raises InvalidRequestError for more of a kind than ``vllm_args.limit_mm_per_prompt`` has: vLLM's own processor
    would, and vLLM's engine, which has not even loaded the encoder of a kind with limit 0, would die.
    """
    for kind, places in prompt.engine_input.get("mm_placeholders", {}).items():
        if len(places) > limit_of(kind):
            sound = ", a video's sound counted" if kind == "audio" else ""
            raise InvalidRequestError(
                "messages", f"must have at most {limit_of(kind)} of {kind} on this server, got {len(places)}{sound}"
            )


def _grids(features: Mapping[str, torch.Tensor], kind: str) -> list[Grid]:
    grids = features.get(f"{kind}_grid_thw")
    return [] if grids is None else [(t, h, w) for t, h, w in grids.tolist()]


def _videos(features: Mapping[str, torch.Tensor]) -> list[tuple[Grid, float]]:
    grids = _grids(features, "video")
    return list(zip(grids, map(float, features["video_second_per_grid"]), strict=True)) if grids else []


def _renamed(features: Mapping[str, torch.Tensor], use_audio_in_video: bool) -> dict[str, Any]:
    """transformers' names to vLLM's; spectrograms [A, mel, T] without their padding, one behind the other."""
    named: dict[str, Any] = {
        name: features[name]
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        if name in features
    }
    if "video_grid_thw" in features:
        named["second_per_grid_ts"] = torch.as_tensor(features["video_second_per_grid"])
        named["use_audio_in_video"] = torch.tensor(use_audio_in_video)
    if "input_features" in features:
        mask = features["feature_attention_mask"].bool()  # [A, T]
        named["input_audio_features"] = features["input_features"].permute(0, 2, 1)[mask].T  # [mel, frames of all]
        named["audio_feature_lengths"] = mask.sum(-1)
        named["feature_attention_mask"] = [torch.ones(int(length)) for length in mask.sum(-1)]
    return named


def _places(ids: Int32, mrope: MRope) -> dict[str, list[PlaceholderRange]]:
    """Each run of pads; a video with sound has two ranges over the same run, each with its own pads marked."""
    media = np.isin(ids, mrope.media_ids)
    places: dict[str, list[PlaceholderRange]] = {}
    for start, end in _runs(media):
        run = ids[start:end]
        kinds = (("video", mrope.video_token_id), ("audio", mrope.audio_token_id), ("image", mrope.image_token_id))
        for modality, pad in kinds:
            marked = run == pad
            if marked.any():
                is_embed = None if marked.all() else torch.from_numpy(marked)
                place = PlaceholderRange(offset=start, length=end - start, is_embed=is_embed)
                places.setdefault(modality, []).append(place)
    return places


def _runs(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _hash(item: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(item):
        data = torch.as_tensor(item[name].data).contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)};".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _join_interleaved(hashes: dict[str, list[str]], places: Mapping[str, list[PlaceholderRange]]) -> None:
    """A block inside a video with sound is known to vLLM's prefix cache by the video alone: add the sound to it."""
    sounds = {place.offset: i for i, place in enumerate(places.get("audio", []))}
    for i, place in enumerate(places.get("video", [])):
        if place.is_embed is not None and place.offset in sounds:
            hashes["video"][i] += "+" + hashes["audio"][sounds[place.offset]]
