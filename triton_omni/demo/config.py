"""Sizes of the demo checkpoint; everything else as the published config.json has it."""

from __future__ import annotations

from typing import Any

from triton_omni.demo.tokenizer import token_ids

THINKER_HIDDEN = 128
TALKER_HIDDEN = 64
VOCABULARY_MULTIPLE = 64
CODE_GROUPS = 16
SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
MAX_TEXT_TOKENS = 256
MAX_FRAMES = 1024

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_ROPE = {"rope_theta": 1_000_000, "max_position_embeddings": 4096}
_MROPE = {
    **_ROPE,
    "rope_scaling": {
        "interleaved": True,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
        "rope_type": "default",
        "type": "default",
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


def config() -> dict[str, Any]:
    """config.json."""
    ids = {token.decode(): i for token, i in token_ids().items() if len(token) > 3 and token.isascii()}
    media = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "thinker_config": {
            **media,
            "model_type": "qwen3_omni_moe_thinker",
            "user_token_id": ids["user"],
            "tie_word_embeddings": False,
            "text_config": _thinker_text(),
            "audio_config": _audio(),
            "vision_config": _vision(),
        },
        "talker_config": {
            **media,
            "model_type": "qwen3_omni_moe_talker",
            "accept_hidden_layer": 3,
            "thinker_hidden_size": THINKER_HIDDEN,
            "num_code_groups": CODE_GROUPS,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "codec_eos_token_id": 2150,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "speaker_id": SPEAKERS,
            "spatial_merge_size": 2,
            "output_router_logits": False,
            "text_config": _talker_text(),
            "code_predictor_config": _code_predictor(),
        },
        "code2wav_config": _code2wav(),
    }


def generation_config() -> dict[str, Any]:
    """generation_config.json: the published talker values, and caps for both parts."""
    return {
        "talker_max_new_tokens": MAX_FRAMES,
        "talker_repetition_penalty": 1.05,
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
        "thinker_max_new_tokens": MAX_TEXT_TOKENS,
    }


def _thinker_text() -> dict[str, Any]:
    return {
        **_ATTENTION,
        **_MROPE,
        **_EXPERTS,
        "model_type": "qwen3_omni_moe_text",
        "vocab_size": -(-len(token_ids()) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "hidden_size": THINKER_HIDDEN,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 5,
        "shared_expert_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
    }


def _audio() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "downsample_hidden_size": 32,
        "num_mel_bins": 128,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
        "max_source_positions": 1500,
        "output_dim": THINKER_HIDDEN,
    }


def _vision() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "depth": 3,
        "deepstack_visual_indexes": [0, 1],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": THINKER_HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "image_size": 768,
        "apply_vit_abs_pos_embed": True,
    }


def _talker_text() -> dict[str, Any]:
    return {
        **_ATTENTION,
        **_MROPE,
        **_EXPERTS,
        "model_type": "qwen3_omni_moe_talker_text",
        "vocab_size": 3072,
        "hidden_size": TALKER_HIDDEN,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 3,
    }


def _code_predictor() -> dict[str, Any]:
    return {
        **_ATTENTION,
        **_ROPE,
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "vocab_size": 2048,
        "hidden_size": TALKER_HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_code_groups": CODE_GROUPS,
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": 2048,
        "num_quantizers": CODE_GROUPS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 72,
        "max_position_embeddings": 8000,
        "rope_theta": 10_000,
        "layer_scale_initial_scale": 0.01,
        "decoder_dim": 96,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
