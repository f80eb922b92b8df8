"""The forward's form: fixed shapes, and nothing read on the host, so that it can be captured in a graph."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from triton_omni.code2wav.model import StreamingCode2Wav
from triton_omni.code2wav.shape import Code2WavShape, Level
from triton_omni.errors import CheckpointError


def forward_on_fake_tensors(decoder: StreamingCode2Wav, batch: int, frames: int) -> torch.Size:
    """Fake tensors have shapes and no values: reading one raises."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        codes = torch.zeros(batch, frames, decoder.shape.code_groups, dtype=torch.long)
        scalars = [torch.zeros(batch, dtype=torch.long) for _ in range(3)]
        del mode
        return decoder(codes, *scalars).shape


def test_forward_reads_nothing_on_the_host(model, shape):
    size = forward_on_fake_tensors(model(torch.float32), 3, 4)
    assert size == (3, 4 * shape.samples_per_frame)


def test_a_host_read_would_be_noticed(model, monkeypatch):
    decoder = model(torch.float32)
    embed = decoder.code_embedding.forward
    monkeypatch.setattr(decoder.code_embedding, "forward", lambda ids: embed(ids) * ids.max().item())
    with pytest.raises(DataDependentOutputException):
        forward_on_fake_tensors(decoder, 3, 4)


def test_wave_stays_within_full_scale(config, shape, model):
    decoder = model(torch.float32)
    last = decoder.decoder[-1].conv
    saved = last.weight.clone()
    codes = torch.randint(0, shape.codebook_size, (1, 4, shape.code_groups), generator=torch.Generator().manual_seed(0))
    try:
        last.weight.mul_(100)
        with torch.inference_mode():
            wave = decoder(codes, torch.tensor([4]), torch.tensor([0]), torch.tensor([0]))
    finally:
        last.weight.copy_(saved)
    assert (wave.max().item(), wave.min().item()) == (1, -1)


def test_levels_of_the_published_shape(config):
    published = {**config.code2wav, "upsampling_ratios": [2, 2], "upsample_rates": [8, 5, 4, 3]}
    shape = Code2WavShape.from_config(published)
    expected = [(1, 0), (2, 0), (4, 0), (32, 8), (160, 45), (640, 184), (1920, 555)]
    assert list(shape.levels) == [Level(*level) for level in expected]
    assert (shape.samples_per_frame, shape.lookahead_samples) == (1920, 555)


@pytest.mark.parametrize("key", ["sliding_window", "upsample_rates", "num_quantizers"])
def test_missing_dimension_is_named(key, config):
    with pytest.raises(CheckpointError, match=key):
        Code2WavShape.from_config({k: v for k, v in config.code2wav.items() if k != key})


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("hidden_act", "gelu", "hidden_act"), ("rope_parameters", {"rope_type": "yarn"}, "rope_type")],
)
def test_what_is_not_implemented_is_refused(key, value, named, config):
    with pytest.raises(CheckpointError, match=named):
        Code2WavShape.from_config({**config.code2wav, key: value})
