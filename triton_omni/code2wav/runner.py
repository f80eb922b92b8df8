"""Runs rows of codes through the decoder, a few forwards for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.schedule import Step, plan
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.pipeline.stages import Int32

STEP_COST_FRAMES = 4  # one frame alone takes as long as five in a long step (demo size, one core)
INT16_FULL_SCALE = 32_767

Wave: TypeAlias = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """``codes`` int32 [frames, code_groups] for the session in ``slot``, after the ``position`` frames it has had."""

    slot: int
    position: int
    codes: Int32


def to_int16(wave: Tensor) -> Tensor:
    """[-1, 1] -> -32767..32767, to the nearest step (ties to even): silence stays 0, both signs are treated alike."""
    return (wave * INT16_FULL_SCALE).round_().to(torch.int16)


def final_part(shape: Code2WavShape, wave: Wave, position: int, frames: int) -> Wave:
    """What counts of one row of a step's output: ``frames`` frames after the ``position`` the session has had."""
    return wave[max(0, shape.lookahead_samples - position * shape.samples_per_frame) : frames * shape.samples_per_frame]


class RowDecoder(Protocol):
    """What the engine needs. ``max_step_frames``: as many frames of one row as are best decoded by one call."""

    shape: Code2WavShape
    max_step_frames: int

    def decode(self, rows: Sequence[Row], finish: Callable[[Tensor], Tensor] = to_int16) -> list[Wave]: ...


class Runner:
    """The reference: PyTorch alone. ``model``: prepared, with its slots allocated."""

    def __init__(self, model: StreamingCode2Wav, max_step_frames: int) -> None:
        self.model, self.shape = model, model.shape
        self.max_step_frames = max_step_frames
        self._device = model.code_embedding.weight.device

    @torch.inference_mode()
    def decode(self, rows: Sequence[Row], finish: Callable[[Tensor], Tensor] = to_int16) -> list[Wave]:
        """The samples that became final, one array per row, through ``finish`` (on the device). Slots must differ."""
        pieces: list[list[Wave]] = [[] for _ in rows]
        lengths = [len(row.codes) for row in rows]
        for step in plan(lengths, step_cost_frames=STEP_COST_FRAMES, max_step_frames=self.max_step_frames):
            for row, wave in zip(step.rows, self._run(rows, step, finish), strict=True):
                pieces[row].append(wave)
        nothing = finish(self.model.code_embedding.weight.new_empty(0)).cpu().numpy()
        return [np.concatenate(parts) if parts else nothing for parts in pieces]

    def _run(self, rows: Sequence[Row], step: Step, finish: Callable[[Tensor], Tensor]) -> list[Wave]:
        codes = np.zeros((len(step.rows), step.frames, self.shape.code_groups), np.int64)
        scalars = np.empty((3, len(step.rows)), np.int64)
        for b, row in enumerate(rows[r] for r in step.rows):
            now = row.codes[step.start : step.start + step.frames]
            codes[b, : len(now)] = now
            scalars[:, b] = len(now), row.position + step.start, row.slot
        lengths, positions, slots = torch.from_numpy(scalars).to(self._device)
        wave = self.model(torch.from_numpy(codes).to(self._device), lengths, positions, slots)
        samples = finish(wave).cpu().numpy()  # [B, step.frames * samples_per_frame]
        return [final_part(self.shape, row, scalars[1, b], scalars[0, b]) for b, row in enumerate(samples)]
