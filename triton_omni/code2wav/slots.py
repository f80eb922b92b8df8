"""Sessions' state in fixed places: one tensor per layer for all slots, and the list of free slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Span:
    """The time axis of one level in one step: column i of row b is sample ``positions[b] * rate - lag + i``.

    rate: the level's samples per codec frame; lag: how many samples the level is behind because each transposed
    convolution waits for its next input. Samples before time 0 do not exist: only the first ``lag`` columns can hold
    such, and they must be zero (a convolution's own padding) wherever a convolution reads them. Built from device
    tensors alone, so that a captured graph can replay it.
    """

    def __init__(self, rate: int, lag: int, slots: Tensor, positions: Tensor, lengths: Tensor) -> None:
        self.slots = slots  # [B]
        self.fresh = positions == 0  # [B] the slot still holds the last session's state
        self.ends = lengths * rate  # [B] columns that belong to the row's state; the rest is padding
        self.lag = lag
        first = (lag - positions * rate).unsqueeze(1)
        self.absent = torch.arange(lag, device=positions.device) < first  # [B, lag]

    def hide_absent(self, x: Tensor) -> Tensor:
        """Zero, in place, what lies before the session's first sample. x: [B, C, L]."""
        if self.lag:
            x[..., : self.lag].masked_fill_(self.absent.unsqueeze(1), 0)
        return x


class History(nn.Module):
    """The last ``length`` inputs of one layer, for every slot: [slots, channels, length], or
    [slots, length, channels] with ``time_axis`` 1. A session's first step reads zeros, whatever the slot holds.
    """

    stored: Tensor
    columns: Tensor

    def __init__(self, channels: int, length: int, *, time_axis: int = 2) -> None:
        super().__init__()
        self.length = length
        self.time_axis = time_axis
        self._slot_shape = (channels, length) if time_axis == 2 else (length, channels)

    def prepare(self, slots: int, like: Tensor) -> None:
        """Allocate, on ``like``'s device and in its dtype."""
        self.register_buffer("stored", like.new_zeros(slots, *self._slot_shape), persistent=False)
        self.register_buffer("columns", torch.arange(self.length, device=like.device), persistent=False)

    def extend(self, x: Tensor, span: Span) -> Tensor:
        """Put the history before x along the time axis and keep the new one: the ``length`` columns before each
        row's end.
        """
        past = self.stored.index_select(0, span.slots).masked_fill_(span.fresh.view(-1, 1, 1), 0)
        joined = torch.cat([past, x], self.time_axis)
        kept = (span.ends.unsqueeze(1) + self.columns).unsqueeze(3 - self.time_axis)
        self.stored.index_copy_(0, span.slots, joined.gather(self.time_axis, kept.expand_as(past)))
        return joined


class SlotPool:
    """Which slots are free; a freed slot is taken again last."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
