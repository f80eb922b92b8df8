"""Sizes and ids of a checkpoint's talker, as config.json has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from triton_omni.errors import CheckpointError
from triton_omni.model_config import ModelConfig

# transformers suppresses the last 1,024 ids of the talker's vocabulary (control ids and speakers), EOS excepted.
SUPPRESSED_CODES = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderShape:
    """One stack of decoder layers. ``mrope_section``: rotary pairs taken from (t, h, w), None for plain RoPE."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_bias: bool
    rope_theta: float
    mrope_section: tuple[int, int, int] | None
    vocab: int


@dataclasses.dataclass(frozen=True, slots=True)
class MoeShape:
    """The expert layer of the backbone."""

    experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    normalise_weights: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CodecIds:
    """Ids of the talker's own vocabulary that are not sound."""

    eos: int
    bos: int
    pad: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclasses.dataclass(frozen=True, slots=True)
class TextIds:
    """Ids of the thinker's vocabulary that prefill and decode look for or insert. ``media``: audio, image, video."""

    im_start: int
    user: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    media: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TalkerShape:
    """Everything of config.json that the talker is built from."""

    backbone: DecoderShape
    moe: MoeShape
    predictor: DecoderShape
    groups: int
    thinker_hidden: int
    thinker_vocab: int
    projection_intermediate: int
    max_positions: int
    codec: CodecIds
    text: TextIds
    speakers: Mapping[str, int]
    default_speaker: str

    @classmethod
    def read(cls, config: ModelConfig) -> TalkerShape:
        """Raises CheckpointError naming the missing key, or a feature that this talker does not have."""
        try:
            return cls._read(config)
        except KeyError as error:
            raise CheckpointError(f"{config.path / 'config.json'}: the talker needs {error.args[0]!r}") from None

    @classmethod
    def _read(cls, config: ModelConfig) -> TalkerShape:
        talker, thinker = config.talker, config.thinker
        text, predictor = talker["text_config"], talker["code_predictor_config"]
        experts = text["num_experts"] if "num_experts" in text else text["num_local_experts"]
        return cls(
            backbone=_decoder(text, mrope=True),
            moe=MoeShape(
                experts=experts,
                experts_per_token=text["num_experts_per_tok"],
                intermediate=text["moe_intermediate_size"],
                shared_intermediate=text["shared_expert_intermediate_size"],
                normalise_weights=text.get("norm_topk_prob", False),
            ),
            predictor=_decoder(predictor, mrope=False),
            groups=talker["num_code_groups"],
            thinker_hidden=talker["thinker_hidden_size"],
            thinker_vocab=thinker["text_config"]["vocab_size"],
            projection_intermediate=text["intermediate_size"],
            max_positions=text["max_position_embeddings"],
            codec=CodecIds(
                eos=talker["codec_eos_token_id"],
                bos=talker["codec_bos_id"],
                pad=talker["codec_pad_id"],
                nothink=talker["codec_nothink_id"],
                think_bos=talker["codec_think_bos_id"],
                think_eos=talker["codec_think_eos_id"],
            ),
            text=TextIds(
                im_start=config.raw["im_start_token_id"],
                user=config.raw["user_token_id"],
                assistant=config.raw["assistant_token_id"],
                tts_pad=config.raw["tts_pad_token_id"],
                tts_bos=config.raw["tts_bos_token_id"],
                tts_eos=config.raw["tts_eos_token_id"],
                media=(thinker["audio_token_id"], thinker["image_token_id"], thinker["video_token_id"]),
            ),
            speakers=config.speakers,
            default_speaker=config.default_speaker,
        )


def _decoder(section: Mapping[str, Any], *, mrope: bool) -> DecoderShape:
    rope = _rope_parameters(section)
    if section.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"talker: hidden_act must be 'silu', got {section['hidden_act']!r}")
    if section.get("sliding_window") is not None:
        raise CheckpointError(f"talker: sliding_window must be null, got {section['sliding_window']!r}")
    section_thw = rope["mrope_section"] if mrope else None
    heads = section["num_attention_heads"]
    return DecoderShape(
        layers=section["num_hidden_layers"],
        hidden=section["hidden_size"],
        intermediate=section["intermediate_size"],
        heads=heads,
        kv_heads=section["num_key_value_heads"],
        head_dim=section.get("head_dim") or section["hidden_size"] // heads,
        norm_eps=section["rms_norm_eps"],
        attention_bias=section.get("attention_bias", False),
        rope_theta=float(rope["rope_theta"]),
        mrope_section=None if section_thw is None else (section_thw[0], section_thw[1], section_thw[2]),
        vocab=section["vocab_size"],
    )


def _rope_parameters(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes ``rope_parameters``; the published file has ``rope_theta`` and ``rope_scaling``."""
    rope = {**(section.get("rope_scaling") or {}), **(section.get("rope_parameters") or {})}
    if "rope_theta" not in rope:
        rope["rope_theta"] = section["rope_theta"]
    # "mrope" is an older name for the default frequencies with mrope_section.
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "mrope"):
        raise CheckpointError(f"talker: rope_type must be 'default', got {kind!r}")
    return rope
