"""Sessions driven through the Runner in float, and the reference they must equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from triton_omni.checkpoint import Checkpoint
from triton_omni.code2wav.runner import Row, Runner
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.model_config import ModelConfig

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-4}  # of full scale, which is 1


def reference_model(config: ModelConfig, dtype: torch.dtype) -> Qwen3OmniMoeCode2Wav:
    model = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**config.code2wav))
    checkpoint, prefix = Checkpoint(config), "code2wav."
    model.load_state_dict({name.removeprefix(prefix): checkpoint.tensor(name) for name in checkpoint.names(prefix)})
    return model.eval().to(dtype)


def reference_wave(model: Qwen3OmniMoeCode2Wav, codes: np.ndarray) -> np.ndarray:
    """[samples]: one forward pass over codes [frames, code_groups]."""
    with torch.no_grad():
        return model(torch.from_numpy(codes).long().T[None])[0, 0].numpy()


def random_codes(config: ModelConfig, frames: int, seed: int) -> np.ndarray:
    shape = (frames, config.code2wav["num_quantizers"])
    return np.random.default_rng(seed).integers(0, config.code2wav["codebook_size"], shape, dtype=np.int32)


def final_samples(shape: Code2WavShape, frames: int) -> int:
    """Samples that are final after ``frames`` frames, and the length of the reference's wave."""
    return max(0, frames * shape.samples_per_frame - shape.lookahead_samples)


def cut(codes: np.ndarray, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Chunks of ``sizes`` frames; the last size repeats."""
    start = 0
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if start >= len(codes):
            return
        yield codes[start : start + size]
        start += size


@dataclasses.dataclass
class Stream:
    """A session in ``slot`` whose first chunk comes in call ``delay``."""

    slot: int
    codes: np.ndarray
    sizes: Sequence[int]
    delay: int = 0

    def wave(self, runner: Runner) -> np.ndarray:
        """Alone."""
        return play(runner, [dataclasses.replace(self, delay=0)])[0]


def play(runner: Runner, streams: Sequence[Stream]) -> list[np.ndarray]:
    """All streams at once: each call holds the next chunk of every stream that has one. Returns their waves."""
    waves: list[list[np.ndarray]] = [[] for _ in streams]
    positions = [0] * len(streams)
    pending = [cut(stream.codes, stream.sizes) for stream in streams]
    for call in itertools.count():
        ready = {i: next(pending[i], None) for i, stream in enumerate(streams) if stream.delay <= call}
        rows = {i: Row(streams[i].slot, positions[i], codes) for i, codes in ready.items() if codes is not None}
        if not rows and len(ready) == len(streams):
            return [np.concatenate(parts) for parts in waves]
        for i, wave in zip(rows, runner.decode(list(rows.values()), lambda samples: samples), strict=True):
            waves[i].append(wave)
            positions[i] += len(rows[i].codes)
