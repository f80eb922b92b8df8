"""State in fixed slots: nothing of the last session, of the padding or of other slots gets into a session."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.code2wav.streams import Stream, random_codes
from triton_omni.code2wav.slots import History, SlotPool, Span


@pytest.fixture
def decoder(model):
    return model(torch.float32)


def histories(decoder) -> list[torch.Tensor]:
    found = [module.stored for module in decoder.modules() if isinstance(module, History)]
    assert found
    return found


def test_a_reused_slot_holds_no_trace(config, decoder, runner):
    stream = Stream(2, random_codes(config, 20, seed=1), [4, 8])
    fresh = stream.wave(runner(torch.float32))
    Stream(2, random_codes(config, 100, seed=2), [25]).wave(runner(torch.float32))
    np.testing.assert_array_equal(stream.wave(runner(torch.float32)), fresh)
    for stored in histories(decoder):
        stored[2] = torch.nan
    np.testing.assert_array_equal(stream.wave(runner(torch.float32)), fresh)


def test_other_slots_are_not_touched(config, decoder, runner):
    for stored in histories(decoder):
        stored.fill_(7)
    Stream(2, random_codes(config, 20, seed=1), [4, 8]).wave(runner(torch.float32))
    others = [0, 1, 3, 4, 5]
    assert all(bool((stored[others] == 7).all()) for stored in histories(decoder))
    assert all(bool((stored[2] != 7).any()) for stored in histories(decoder))


def test_padding_never_reaches_the_state(config, shape, decoder):
    codes = torch.from_numpy(random_codes(config, 16, seed=1)).long()[None]
    other_padding = codes.clone()
    other_padding[:, 5:] = (codes[:, 5:] + 1) % shape.codebook_size
    states = []
    with torch.inference_mode():
        for batch in (codes, other_padding):
            decoder(batch, torch.tensor([5]), torch.tensor([0]), torch.tensor([1]))
            states.append([stored[1].clone() for stored in histories(decoder)])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_row_without_frames_keeps_its_state(config, decoder):
    codes = torch.from_numpy(random_codes(config, 16, seed=1)).long()[None]
    with torch.inference_mode():
        decoder(codes, torch.tensor([16]), torch.tensor([0]), torch.tensor([1]))
        before = [stored.clone() for stored in histories(decoder)]
        decoder(codes, torch.tensor([0]), torch.tensor([16]), torch.tensor([1]))
    assert all(torch.equal(a, b) for a, b in zip(before, histories(decoder), strict=True))


def test_span_hides_what_lies_before_the_first_sample():
    """Two frames of rate 4 that lag 6: the second frame's first two columns do not exist either."""
    positions = torch.tensor([0, 1, 2])
    span = Span(4, 6, torch.arange(3), positions, torch.ones_like(positions))
    hidden = span.hide_absent(torch.ones(3, 1, 8))[:, 0]
    assert hidden.tolist() == [[0] * 6 + [1] * 2, [0] * 2 + [1] * 6, [1] * 8]


def test_memory_of_a_slot_is_counted(decoder):
    assert decoder.slot_bytes * len(histories(decoder)[0]) == sum(stored.nbytes for stored in histories(decoder))


def test_pool_hands_out_each_slot_once():
    pool = SlotPool(2)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, None]
    pool.give_back(1)
    assert (len(pool), pool.take()) == (1, 1)
