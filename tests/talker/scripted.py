"""A runner without a network: it says what it hears, so that a test can read which text reached which session when."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from triton_omni.talker.shape import TalkerShape

EOS_TEXT, FAIL_TEXT, BLOCK_TEXT = 30, 31, 32


class ScriptedRunner:
    """Frame codes are [text id heard, slot, 0, …]; EOS_TEXT ends the speech, FAIL_TEXT breaks the step, BLOCK_TEXT
    makes it wait for ``released``. ``steps`` lists the slots of each decode step.
    """

    def __init__(self, shape: TalkerShape) -> None:
        self.talker = SimpleNamespace(shape=shape)
        self.slots = SimpleNamespace(open=lambda slot, sampling, seed: None)
        self.steps: list[list[int]] = []
        self.reached, self.released = threading.Event(), threading.Event()

    def prompt_rows(self, prefill: Any, first_text_id: int) -> torch.Tensor:
        return torch.full((prefill.rows, 1), first_text_id)

    def prefill(self, slot: int, rows: torch.Tensor, positions: np.ndarray, start: int) -> torch.Tensor:
        return rows[-1:]

    def first_frame(self, slot: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._frames([slot], [int(hidden)])

    def decode(self, slots: list[int], text_ids: list[int], limit: int) -> torch.Tensor:
        self.steps.append(slots)
        return self._frames(slots, text_ids)

    def _frames(self, slots: list[int], text_ids: list[int]) -> torch.Tensor:
        if FAIL_TEXT in text_ids:
            raise RuntimeError("out of luck")
        if BLOCK_TEXT in text_ids:
            self.reached.set()
            assert self.released.wait(60)
        codes = torch.zeros(len(slots), self.talker.shape.groups, dtype=torch.long)
        codes[:, 1] = torch.tensor(slots)
        codes[:, 0] = torch.tensor([self.talker.shape.codec.eos if t == EOS_TEXT else t for t in text_ids])
        return codes
