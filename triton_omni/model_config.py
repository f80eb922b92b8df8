"""What the parts need to know of a checkpoint before any tensor is read: config.json and generation_config.json."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_omni.errors import CheckpointError

CHECKPOINT_VARIABLE = "OMNI_CHECKPOINT"
SAMPLE_RATE_HZ = 24_000
CODEC_FRAMES_PER_SECOND = 12.5
# What a stage runs on: the checkpoint's tensors, or random ones of their shapes, to measure speed without them.
WEIGHTS = ("checkpoint", "random")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """``raw`` is config.json as it stands; ``generation`` generation_config.json (empty if absent)."""

    path: Path
    raw: Mapping[str, Any]
    generation: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read a checkpoint directory. Raises CheckpointError naming what is missing."""
        root = Path(path)
        raw = _read_json(root / "config.json", required=True)
        if raw.get("model_type") != "qwen3_omni_moe":
            raise CheckpointError(f"{root}: model_type must be 'qwen3_omni_moe', got {raw.get('model_type')!r}")
        return cls(path=root, raw=raw, generation=_read_json(root / "generation_config.json", required=False))

    @classmethod
    def from_environment(cls) -> ModelConfig:
        """The checkpoint that OMNI_CHECKPOINT names."""
        path = os.environ.get(CHECKPOINT_VARIABLE)
        if not path:
            raise CheckpointError(f"set {CHECKPOINT_VARIABLE} to the directory of a Qwen3-Omni checkpoint")
        return cls.load(path)

    @property
    def thinker(self) -> Mapping[str, Any]:
        return self.section("thinker_config")

    @property
    def talker(self) -> Mapping[str, Any]:
        return self.section("talker_config")

    @property
    def code2wav(self) -> Mapping[str, Any]:
        return self.section("code2wav_config")

    def section(self, name: str) -> Mapping[str, Any]:
        """A part of config.json. Raises CheckpointError when the checkpoint lacks it."""
        if name not in self.raw:
            raise CheckpointError(f"{self.path / 'config.json'}: no {name!r}")
        part: Mapping[str, Any] = self.raw[name]
        return part

    @property
    def speaks(self) -> bool:
        """False for checkpoints without speech output."""
        return bool(self.raw.get("enable_audio_output", True)) and "talker_config" in self.raw

    @property
    def speakers(self) -> dict[str, int]:
        """Voice name in lower case -> codec id."""
        return {name.lower(): int(id_) for name, id_ in self.talker["speaker_id"].items()}

    @property
    def default_speaker(self) -> str:
        """transformers' default where the checkpoint has it, else its first voice."""
        names = self.speakers
        return "ethan" if "ethan" in names else next(iter(names))

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus answer of the thinker."""
        return int(self.thinker["text_config"]["max_position_embeddings"])

    @property
    def code_groups(self) -> int:
        return int(self.talker["num_code_groups"])


def _read_json(path: Path, *, required: bool) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise CheckpointError(f"{path} does not exist") from None
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    return content
