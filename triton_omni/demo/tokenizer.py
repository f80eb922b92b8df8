"""Byte-level BPE with Qwen's pre-tokenizer and special tokens, and the published model's processor settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from triton_omni.demo.chat_template import CHAT_TEMPLATE
from triton_omni.demo.text import grammar

ROLES = ("system", "user", "assistant")
# In the order of the published vocabulary; the False ones are ordinary added tokens there.
ADDED_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|fim_prefix|>": False,
    "<|fim_middle|>": False,
    "<|fim_suffix|>": False,
    "<|fim_pad|>": False,
    "<|repo_name|>": False,
    "<|file_sep|>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
    "<|audio_start|>": True,
    "<|audio_end|>": True,
    "<tts_pad>": True,
    "<tts_text_bos>": True,
    "<tts_text_eod>": True,
    "<tts_text_bos_single>": True,
    "<|audio_pad|>": True,
}
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
MAX_IMAGE_PIXELS = 512 * 512


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token (in byte-level letters) -> id, bytes first, and the merges in order of rank.

    Each word is merged from its front; the roles come last, so that "user" never splits "houses".
    """
    letter = _byte_letters()
    vocab = {letter[byte]: i for i, byte in enumerate(sorted(letter, key=lambda b: letter[b]))}
    merges: list[tuple[str, str]] = []
    for word in [*grammar().leads_to, *(role.encode() for role in ROLES)]:
        letters = "".join(letter[byte] for byte in word)
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocab:
                vocab[letters[:end]] = len(vocab)
                merges.append((letters[: end - 1], letters[end - 1]))
    return vocab, merges


def token_ids() -> dict[bytes, int]:
    """Every token's id by its bytes; added tokens follow the vocabulary."""
    letter = _byte_letters()
    byte = {char: value for value, char in letter.items()}
    vocab, _ = vocabulary()
    ids = {bytes(byte[char] for char in token): i for token, i in vocab.items()}
    return ids | {token.encode(): len(vocab) + i for i, token in enumerate(ADDED_TOKENS)}


def write_processor(out: Path) -> None:
    """vocab.json, merges.txt, tokenizer_config.json, preprocessor_config.json and chat_template.json."""
    vocab, merges = vocabulary()
    _write_json(out / "vocab.json", vocab)
    lines = "\n".join(" ".join(pair) for pair in merges)
    (out / "merges.txt").write_text(f"#version: 0.2\n{lines}\n", encoding="utf-8")
    _write_json(out / "tokenizer_config.json", _tokenizer_config(len(vocab)))
    _write_json(out / "preprocessor_config.json", _preprocessor_config())
    _write_json(out / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def _tokenizer_config(first_added_id: int) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(first_added_id + i): {"content": token, **flags, "special": special}
        for i, (token, special) in enumerate(ADDED_TOKENS.items())
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [token for token, special in ADDED_TOKENS.items() if special],
        **NAMED_TOKENS,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": NAMED_TOKENS,
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3OmniMoeProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        # audio
        "feature_extractor_type": "WhisperFeatureExtractor",
        "chunk_length": 300,
        "dither": 0.0,
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16_000,
        # images and video
        "image_processor_type": "Qwen2VLImageProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": 56 * 56,
        "max_pixels": MAX_IMAGE_PIXELS,
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    if set(table.values()) != set(ByteLevel.alphabet()):
        raise AssertionError("byte letters differ from the tokenizer's")
    return table


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
