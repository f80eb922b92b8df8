"""The demo checkpoint: published form, reproducible, audible, sensitive to every part, and its answers end."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from tests.conftest import ROOT
from tests.oracle import MUTATIONS, Oracle
from tests.test_oracle import png, wav
from triton_omni.checkpoint import Checkpoint
from triton_omni.demo.checkpoint import write_checkpoint
from triton_omni.demo.text import CLAUSES, grammar
from triton_omni.model_config import ModelConfig

TEXT = [{"role": "user", "content": "hello there"}]
AUDIO = [{"role": "user", "content": [{"type": "audio", "media": 0}]}]
IMAGE = [{"role": "user", "content": [{"type": "image", "media": 0}, {"type": "text", "text": "what?"}]}]
PROMPTS = {"text": (TEXT, ()), "audio": (AUDIO, (wav(1.0),)), "image": (IMAGE, (png(96, 128),))}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    write_checkpoint(out)
    return out


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Oracle:
    return Oracle(tiny)


def digest(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    """Codes that differ in a frame that both have."""
    frames = min(len(one), len(other))
    return frames > 0 and not np.array_equal(one[:frames], other[:frames])


def test_script_writes_the_published_files(tiny: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_tiny_checkpoint.py"
    out = tmp_path / "new" / "checkpoint"
    subprocess.run([sys.executable, str(script), "--out", str(out), "--seed", "0"], check=True)
    shards = {f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)}
    others = {"config.json", "generation_config.json", "model.safetensors.index.json", "preprocessor_config.json"}
    tokenizer = {"vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.json"}
    assert set(digest(out)) == shards | others | tokenizer
    assert sum(file.stat().st_size for file in out.iterdir()) < 40_000_000
    assert digest(out) == digest(tiny)


def test_seed_changes_the_weights_alone(tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    mine, theirs = digest(tiny), digest(tmp_path)
    assert {name for name in mine if mine[name] != theirs[name]} == {n for n in mine if n.endswith(".safetensors")}


def test_transformers_takes_every_tensor(tiny: Path) -> None:
    _, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_tensor_names_are_the_published_ones(tiny: Path) -> None:
    checkpoint = Checkpoint(ModelConfig.load(tiny))
    names = {re.sub(r"\.\d+(?=\.)", ".N", name) for name in checkpoint.names()}
    assert {
        "thinker.model.embed_tokens.weight",
        "thinker.model.layers.N.mlp.experts.N.gate_proj.weight",
        "thinker.model.layers.N.mlp.gate.weight",
        "thinker.audio_tower.conv2d1.weight",
        "thinker.visual.merger_list.N.mlp.N.weight",
        "thinker.lm_head.weight",
        "talker.model.layers.N.mlp.experts.N.down_proj.weight",
        "talker.model.layers.N.mlp.shared_expert_gate.weight",
        "talker.code_predictor.model.codec_embedding.N.weight",
        "talker.code_predictor.lm_head.N.weight",
        "talker.codec_head.weight",
        "talker.hidden_projection.linear_fc1.bias",
        "code2wav.code_embedding.weight",
        "code2wav.decoder.N.block.N.act1.alpha",
        "code2wav.pre_transformer.layers.N.self_attn_layer_scale.scale",
    } <= names
    assert not [name for name in names if "gate_up_proj" in name or "language_model" in name]
    assert checkpoint.tensor("talker.codec_head.weight").dtype == torch.bfloat16


def test_config_has_the_published_form(tiny: Path) -> None:
    config = ModelConfig.load(tiny)
    text = config.thinker["text_config"]
    assert "rope_parameters" not in json.dumps(config.raw)
    assert text["rope_theta"] == config.talker["code_predictor_config"]["rope_theta"] == 1_000_000
    assert sum(text["rope_scaling"]["mrope_section"]) == text["head_dim"] // 2
    deepest = len(config.thinker["vision_config"]["deepstack_visual_indexes"])
    assert deepest < config.talker["accept_hidden_layer"] < text["num_hidden_layers"]
    assert np.prod(config.code2wav["upsample_rates"] + config.code2wav["upsampling_ratios"]) == 1920
    assert {"image_size", "apply_vit_abs_pos_embed"} <= config.thinker["vision_config"].keys()
    assert config.generation["talker_temperature"] == 0.9 and config.generation["talker_top_k"] == 50


def test_tokenizer(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = ModelConfig.load(tiny).raw
    for role in ("system", "user", "assistant"):
        assert tokenizer.encode(role) == [config[f"{role}_token_id"]]
    assert tokenizer.encode("<|im_end|>") == [config["im_end_token_id"]] == [tokenizer.eos_token_id]
    text = "Wie geht's, 你好 🙂 naïve houses\n\n  1234"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" houses") + tokenizer.encode("12")] == [
        " houses",
        "1",
        "2",
    ]
    assert len(tokenizer) <= ModelConfig.load(tiny).thinker["text_config"]["vocab_size"]


def test_chat_template(reference: Oracle) -> None:
    parts = [{"type": "image", "media": 0}, {"type": "audio"}, {"type": "video"}, {"type": "text", "text": "x"}]
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    rendered = reference.processor.apply_chat_template(
        [
            {"role": "system", "content": "be nice"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "tool_calls": [call]},
            {"role": "tool", "content": "noon"},
            {"role": "tool", "content": "one"},
        ],
        tools=[tool],
        tokenize=False,
        add_generation_prompt=True,
    )
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nbe nice\n\n# Tools\n") and '"name": "now"' in system
    assert rest == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>x<|im_end|>\n"
        '<|im_start|>assistant\nyes\n<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_every_text_ends() -> None:
    language = grammar()
    assert all(after < language.leads_to[token] for token, states in language.follows.items() for after in states)
    assert sum(clause.count("|") + 1 for clause in CLAUSES) == 60


def test_texts_are_readable_end_and_depend_on_the_prompt(reference: Oracle) -> None:
    prompts = ["hi", "hello there", "Who are you?", "1+1", "please sing a song", "Name three rivers.", "goodbye"]
    answers = [reference.answer([{"role": "user", "content": p}], speech=False, max_text_tokens=64) for p in prompts]
    words = {token.decode(errors="ignore") for token in grammar().leads_to}
    for answer in answers:
        assert answer.finish_reason == "stop" and 12 <= len(answer.token_ids) <= 62
        assert all(f" {word}" in words or word in words for word in re.findall(r"\w+", answer.text))
    assert len({answer.text for answer in answers}) >= 5
    assert max(len(answer.token_ids) for answer in answers) >= 60


@pytest.mark.parametrize("kind", PROMPTS)
def test_speech_is_heard_and_ends_by_itself(reference: Oracle, kind: str) -> None:
    messages, media = PROMPTS[kind]
    answer = reference.answer(messages, media, max_text_tokens=16, max_frames=120)
    assert answer.codes is not None and answer.wave is not None
    assert answer.speech_finish_reason == "stop"
    assert len(answer.token_ids) + 4 < len(answer.codes) < 5 * len(answer.token_ids)
    assert len({tuple(frame) for frame in answer.codes}) > 0.9 * len(answer.codes)
    assert 0.05 < answer.wave.std() < 0.2 and abs(answer.wave.mean()) < 0.03
    assert np.abs(answer.wave).max() < 0.99


def test_sampled_speech_ends_by_itself(reference: Oracle) -> None:
    inputs = reference.inputs(TEXT)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="repetition_penalty"):
        _, wave = reference.model.generate(
            **inputs,
            thinker_do_sample=False,
            thinker_max_new_tokens=17,
            thinker_eos_token_id=reference.config.im_end_token_id,
            talker_max_new_tokens=120,
        )
    frames = (wave.shape[-1] + 555) // 1920
    assert 18 < frames < 100


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_changes_codes(reference: Oracle, name: str) -> None:
    kind = "image" if name in {"media rows zeroed", "rows of another layer", "linear positions"} else "text"
    messages, media = PROMPTS[kind]
    right = reference.answer(messages, media, max_text_tokens=16, max_frames=20)
    with reference.mutated(name):
        wrong = reference.answer(messages, media, max_text_tokens=16, max_frames=20)
    assert right.codes is not None and wrong.codes is not None and differ(wrong.codes, right.codes)


def test_speakers_and_prompts_have_codes_of_their_own(reference: Oracle) -> None:
    speakers = list(reference.config.talker_config.speaker_id)
    codes = [reference.answer(TEXT, speaker=s, max_text_tokens=16, max_frames=4).codes for s in speakers]
    codes.append(reference.answer([{"role": "user", "content": "hello then"}], max_text_tokens=16, max_frames=4).codes)
    assert all(differ(codes[i], codes[j]) for i in range(len(codes)) for j in range(i))  # type: ignore[arg-type]


def test_one_frame_and_old_context_are_heard(reference: Oracle) -> None:
    groups = reference.config.talker_config.num_code_groups
    codes = np.random.default_rng(0).integers(0, 2048, (80, groups)).astype(np.int32)
    wave = reference.wave(codes)
    changed = codes.copy()
    changed[60, 3] = (changed[60, 3] + 1) % 2048
    assert np.abs(reference.wave(changed) - wave).max() > 0.03
    windowed = reference.wave(codes[40 - 25 :])[25 * 1920 :]
    assert np.abs(windowed - wave[40 * 1920 :]).max() > 0.03
