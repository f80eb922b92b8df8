"""Write the demo checkpoint: the files the published one has, through transformers' own classes."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.utils import logging as transformers_logging

from triton_omni.demo.code2wav import shape_code2wav
from triton_omni.demo.config import config, generation_config
from triton_omni.demo.talker import shape_talker
from triton_omni.demo.thinker import shape_thinker
from triton_omni.demo.tokenizer import write_processor
from triton_omni.demo.weights import fill

MAX_SHARD_SIZE = "6MB"
CONFIG_FILE = "config.json"


def write_checkpoint(out: Path, seed: int = 0) -> None:
    """A directory that transformers, vLLM and our own stages load like Qwen/Qwen3-Omni-30B-A3B-Instruct: bfloat16
    shards with index, per-expert weights, config, generation config, tokenizer and processor. The same seed gives the
    same bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as draft:
        _write_files(Path(draft), seed)
        files = sorted(Path(draft).iterdir(), key=lambda file: file.name == CONFIG_FILE)
        for file in files:  # config.json last: where it is, the rest is complete
            file.replace(out / file.name)


def _write_files(out: Path, seed: int) -> None:
    with _quiet(), _one_thread():
        model = build_model(seed)
        model.save_pretrained(out, max_shard_size=MAX_SHARD_SIZE)
    for shard in out.glob("*.safetensors"):
        shard.chmod(0o644)  # as the other files: a server may run as another user
    _write_json(out / CONFIG_FILE, _merged(_published_form(model.config.to_dict()), config()))
    _write_json(out / "generation_config.json", generation_config())
    write_processor(out)


def build_model(seed: int) -> Any:
    """The model of ``config()`` with its weights, in bfloat16."""
    with torch.random.fork_rng(devices=[]):
        model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config())).eval()
    fill(model, seed)
    shape_thinker(model.thinker, seed)
    shape_talker(model.talker)
    shape_code2wav(model.code2wav, seed)
    return model.to(torch.bfloat16)


def _published_form(section: Any) -> Any:
    """transformers 5 writes ``rope_parameters`` and, for the talker, ``num_local_experts``; published checkpoints have
    ``rope_theta``, ``rope_scaling`` and ``num_experts``.
    """
    if not isinstance(section, dict):
        return section
    renamed = ("rope_parameters", "num_local_experts")
    written = {key: _published_form(value) for key, value in section.items() if key not in renamed}
    rope = dict(section.get("rope_parameters") or {})
    if rope.get("rope_type") == "default":
        written["rope_theta"] = rope.pop("rope_theta")
        written["rope_scaling"] = rope if "mrope_section" in rope else None
    return written


def _merged(section: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _merged(section.get(key) or {}, value) for key, value in over.items() if isinstance(value, dict)}
    return {**section, **over, **inner}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers tells of its own extra rope keys at every load."""
    verbosity, progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The order of sums, and with it the measured loudness, must not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
