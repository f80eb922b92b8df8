"""The past of a convolution, kept per session."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns"])
def _exchange(
    x, stored, slots, positions, lengths, columns,
    HEAD: tl.constexpr, C: tl.constexpr, RATE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = tl.arange(0, BLOCK_H)
    ok = (i < HEAD)[:, None] & (c < C)[None, :]
    kept = stored + ((tl.load(slots + batch) * HEAD + i) * C)[:, None] + c[None, :]
    fresh = tl.load(positions + batch) == 0
    past = tl.load(kept, mask=ok & (fresh == 0), other=0.0)
    row = x + ((batch * (HEAD + columns) + i) * C)[:, None] + c[None, :]
    tl.store(row, past, mask=ok)
    tl.debug_barrier()  # what one thread stored another reads, and all have read the old state
    end = tl.load(lengths + batch) * RATE
    tl.store(kept, tl.load(row + end * C, mask=ok), mask=ok)


def exchange(
    x: torch.Tensor,
    stored: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    columns: int,
    rate: int,
) -> None:
    """Put each row's past in front of its columns, and keep the last columns that count for the next step.

    x: flat storage of [batch, head + columns, C], columns = frames * rate; stored [slots, head, C]; slots, positions,
    lengths int32 [batch]: a row at position 0 is fresh and has zeros for a past; the first ``lengths * rate`` columns
    count. Rows need slots of their own, but those whose state nobody reads.
    """
    head, channels = stored.shape[1:]
    block_h = triton.next_power_of_2(head)
    block_c = min(triton.next_power_of_2(channels), max(64, 4096 // block_h))
    _exchange[(slots.shape[0], triton.cdiv(channels, block_c))](
        x, stored, slots, positions, lengths, columns,
        HEAD=head, C=channels, RATE=rate, BLOCK_H=block_h, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
