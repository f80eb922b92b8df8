"""A runner without a network: it says what it hears, so that a test can read which text reached which session when."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from triton_omni.talker.runner import PendingFrames, Piece, Prompt, TensorFrames
from triton_omni.talker.shape import TalkerShape

EOS_TEXT, FAIL_TEXT, BLOCK_TEXT = 30, 31, 32


class ScriptedRunner:
    """Frame codes are [text id heard, slot, 0, …]; EOS_TEXT ends the speech, FAIL_TEXT breaks the step, BLOCK_TEXT
    makes it wait for ``released``. ``steps`` lists the slots of each decode step, ``pieces`` (slot, first, last row) of
    each prefill, ``calls`` the order of both: P for a prefill, S for a step.
    """

    runs_ahead = False

    def __init__(self, shape: TalkerShape) -> None:
        self.shape = shape
        self.steps: list[list[int]] = []
        self.pieces: list[list[tuple[int, int, int]]] = []
        self.calls = ""
        self.reached, self.released = threading.Event(), threading.Event()

    def open(self, slot: int, prefill: Any, sampling: Any, seed: int) -> Prompt:
        return Prompt(slot, prefill, torch.empty(0))

    def prefill(self, pieces: Sequence[Piece]) -> None:
        self.calls += "P"
        self.pieces.append([(piece.prompt.slot, piece.first, piece.last) for piece in pieces])

    def decode(self, slots: list[int], text_ids: list[int], limit: int) -> PendingFrames:
        self.calls += "S"
        self.steps.append(slots)
        return TensorFrames(self._frames(slots, text_ids))

    def _frames(self, slots: list[int], text_ids: list[int]) -> torch.Tensor:
        if FAIL_TEXT in text_ids:
            raise RuntimeError("out of luck")
        if BLOCK_TEXT in text_ids:
            self.reached.set()
            assert self.released.wait(240)
        codes = torch.zeros(len(slots), self.shape.groups, dtype=torch.long)
        codes[:, 1] = torch.tensor(slots)
        codes[:, 0] = torch.tensor([self.shape.codec.eos if t == EOS_TEXT else t for t in text_ids])
        return codes
