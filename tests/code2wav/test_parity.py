"""Streamed code2wav against one forward pass of transformers' module on the same checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeRotaryEmbedding

from tests.code2wav.streams import TOLERANCE, Stream, final_samples, play, random_codes
from triton_omni.code2wav.runner import Row, Runner
from triton_omni.code2wav.transformer import Rotary

pytestmark = pytest.mark.parity

FRAMES = 720
RANDOM_SIZES = np.random.default_rng(5).integers(1, 41, FRAMES).tolist()
CHUNKINGS = {"ones": [1], "growing": [4, 8, 16, 25], "random": RANDOM_SIZES}


def assert_equal(wave: np.ndarray, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert wave.shape == expected.shape
    np.testing.assert_allclose(wave, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", CHUNKINGS.values(), ids=CHUNKINGS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunks_equal_one_pass(dtype, sizes, config, runner, reference):
    codes = random_codes(config, FRAMES, seed=0)
    assert_equal(Stream(0, codes, sizes).wave(runner(dtype)), reference(dtype, codes), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_batched_sessions_equal_their_own_pass(dtype, config, runner, reference):
    """Two long sessions, and in the other slots short ones, one after the other: mates of other lengths and phases."""
    streams = [
        Stream(0, random_codes(config, FRAMES, seed=0), [4, 8, 16, 25]),
        Stream(1, random_codes(config, FRAMES, seed=0), RANDOM_SIZES, delay=2),
        Stream(2, random_codes(config, 12, seed=2), [1], delay=3),
        Stream(2, random_codes(config, 40, seed=3), [7], delay=16),
        Stream(5, random_codes(config, 30, seed=4), [4, 8, 16], delay=1),
        Stream(5, random_codes(config, 30, seed=5), [30], delay=5),
    ]
    for stream, wave in zip(streams, play(runner(dtype), streams), strict=True):
        assert_equal(wave, reference(dtype, stream.codes), dtype)


@pytest.mark.parametrize("order", [1, -1])
def test_batch_mates_change_nothing(order, config, runner):
    dtype = torch.float32
    streams = [Stream(slot, random_codes(config, 10 + 3 * slot, seed=slot), [4, 8, 16]) for slot in range(4)]
    together = play(runner(dtype), streams[::order])[::order]
    for stream, wave in zip(streams, together, strict=True):
        assert_equal(wave, stream.wave(runner(dtype)), dtype)


@pytest.mark.parametrize("max_step_frames", [1, 7])
def test_small_steps_change_nothing(max_step_frames, config, model, runner):
    codes = random_codes(config, 12, seed=0)
    streams = [Stream(slot, codes[slot:], [5]) for slot in range(3)]
    small = play(Runner(model(torch.float64), max_step_frames), streams)
    for wave, expected in zip(small, play(runner(torch.float64), streams), strict=True):
        assert_equal(wave, expected, torch.float64)


def test_one_fixed_shape_serves_all_rows(config, shape, model, reference):
    """Rows of a (batch, frames) step: padded, full, without a frame, fresh, and late in their session."""
    dtype, frames = torch.float64, 12
    codes = random_codes(config, 40, seed=0)
    expected = reference(dtype, codes)
    parts: list[list[np.ndarray]] = [[], [], [], []]
    done = [0, 0, 0, 0]
    for lengths in ([5, 0, 12, 1], [12, 0, 12, 1], [0, 12, 3, 12], [12, 1, 12, 12], [11, 12, 1, 12], [0, 12, 0, 2]):
        batch = np.full((4, frames, shape.code_groups), shape.codebook_size - 1)  # the padding, too, makes sound
        for b, n in enumerate(lengths):
            batch[b, :n] = codes[done[b] : done[b] + n]
        arguments = [torch.from_numpy(batch), *map(torch.tensor, (lengths, done, [3, 0, 5, 1]))]
        with torch.inference_mode():
            wave = model(dtype)(*arguments).numpy()
        for b, n in enumerate(lengths):
            first = max(0, shape.lookahead_samples - done[b] * shape.samples_per_frame)
            parts[b].append(wave[b, first : n * shape.samples_per_frame])
            done[b] += n
    for b in range(4):
        assert_equal(np.concatenate(parts[b]), expected[: final_samples(shape, done[b])], dtype)
    assert done == [40, 37, 40, 40]


def test_rotary_is_the_references_to_the_last_bit(config):
    reference = Qwen3OmniMoeRotaryEmbedding(Qwen3OmniMoeCode2WavConfig(**config.code2wav))
    settings = config.code2wav
    rotary = Rotary(
        settings["hidden_size"] // settings["num_attention_heads"], reference.config.rope_parameters["rope_theta"]
    )
    rotary.prepare(torch.device("cpu"))
    frames = torch.tensor([[0, 1, 71, 8000, 1_000_003, 2**24 - 1]])
    for ours, theirs in zip(rotary(frames, torch.float32), reference(torch.zeros(1), frames), strict=True):
        assert torch.equal(ours[:, 0], theirs)


class TestTheComparisonNotices:
    """Each mistake moves the wave by at least 100 times the tolerance of float32."""

    @pytest.fixture
    def codes(self, config) -> np.ndarray:
        return random_codes(config, 200, seed=0)

    @staticmethod
    def assert_noticed(wave: np.ndarray, expected: np.ndarray) -> None:
        assert np.abs(wave - expected).max() >= 100 * TOLERANCE[torch.float32]

    def test_one_code_frame_changed(self, codes, config, runner, reference):
        changed = codes.copy()
        changed[100] = (changed[100] + 1) % config.code2wav["codebook_size"]
        wave = Stream(0, changed, [25]).wave(runner(torch.float32))
        self.assert_noticed(wave, reference(torch.float32, codes))

    def test_25_frames_of_left_context_instead_of_state(self, codes, shape, runner, reference):
        wave = Stream(0, codes[-50:], [25]).wave(runner(torch.float32))
        samples = 25 * shape.samples_per_frame
        self.assert_noticed(wave[-samples:], reference(torch.float32, codes)[-samples:])

    def test_lookahead_ignored(self, codes, shape, runner, reference):
        """A chunk cut at its frames' borders, as if the samples before them had been final already."""
        first = Stream(0, codes[:25], [25]).wave(runner(torch.float32))
        second = reference(torch.float32, codes)[25 * shape.samples_per_frame :]
        wave = np.concatenate([first, second])
        self.assert_noticed(wave, reference(torch.float32, codes)[: len(wave)])

    def test_session_begun_with_anothers_state(self, codes, shape, runner, reference):
        Stream(0, codes, [25]).wave(runner(torch.float32))
        [wave] = runner(torch.float32).decode([Row(0, len(codes), codes[:25])], lambda samples: samples)
        self.assert_noticed(wave[shape.lookahead_samples :], reference(torch.float32, codes[:25]))
