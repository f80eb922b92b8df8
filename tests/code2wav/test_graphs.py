"""The fused decoder on a GPU: CUDA graphs, buckets and slots change nothing but the time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.code2wav.streams import Stream, play
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.code2wav.runner import Row
from triton_omni.code2wav.shape import Code2WavShape
from triton_omni.pipeline.stages import CodesChunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SLOTS = 8
MIN_SNR_DB = 45
# The rates of the real network; its last levels have widths that the kernels round up.
SHAPE = Code2WavShape(
    code_groups=16, codebook_size=50, hidden_size=128, intermediate_size=192, layers=2, heads=4, kv_heads=4,
    head_dim=32, window=72, rope_theta=1e4, rms_norm_eps=1e-5, attention_bias=False, upsampling_ratios=(2, 2),
    upsample_rates=(8, 5, 4, 3), decoder_dim=384,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    from triton_omni.code2wav.random_weights import random_code2wav

    return random_code2wav(SHAPE, torch.device("cuda"), slots=1)


@pytest.fixture(scope="module")
def make_runner(model) -> Callable[[bool], object]:
    from triton_omni.code2wav.buckets import buckets
    from triton_omni.code2wav.fused import FusedDecoder
    from triton_omni.code2wav.graphs import FusedRunner
    from triton_omni.code2wav.packing import PackedCode2Wav

    packed = PackedCode2Wav(model, torch.float16, torch.device("cuda"))
    shapes = buckets(SLOTS, 200)
    return lambda cuda_graph: FusedRunner(FusedDecoder(packed, SLOTS + 1, shapes), cuda_graph=cuda_graph)


@pytest.fixture(scope="module")
def graphed(make_runner):
    return make_runner(True)


def codes(frames: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.codebook_size, (frames, SHAPE.code_groups), dtype=np.int32)


def reference(model, given: np.ndarray) -> np.ndarray:
    zero = torch.zeros(1, dtype=torch.long, device="cuda")
    exact = {"enabled": True, "benchmark": False, "deterministic": False, "allow_tf32": False}
    with torch.inference_mode(), torch.backends.cudnn.flags(**exact):
        wave = model(torch.from_numpy(given)[None].long().cuda(), zero + len(given), zero, zero)[0]
    return wave[SHAPE.lookahead_samples :].cpu().numpy()


def snr_db(wave: np.ndarray, exact: np.ndarray) -> float:
    assert wave.shape == exact.shape
    return float(10 * np.log10(np.square(exact, dtype=np.float64).sum() / np.square(wave - exact).sum()))


STREAMS = [
    Stream(0, codes(60, seed=0), [4, 8, 16, 25]),
    Stream(1, codes(60, seed=1), [1]),
    Stream(2, codes(45, seed=2), [25], delay=2),
    Stream(5, codes(30, seed=3), [4, 3, 7], delay=1),
    Stream(5, codes(30, seed=4), [30], delay=20),
    Stream(7, codes(51, seed=5), [13, 2], delay=3),
]


def test_graph_replays_equal_eager_launches(graphed, make_runner):
    for replayed, launched in zip(play(graphed, STREAMS), play(make_runner(False), STREAMS), strict=True):
        assert np.abs(replayed - launched).max() <= 1e-3


def test_a_bucket_gives_the_same_bits_replayed_and_launched(graphed, make_runner):
    eager = make_runner(False)
    for frames in (1, 4, 25):
        rows = [Row(slot, 0, codes(frames, seed=slot)) for slot in range(4)]
        for replayed, launched in zip(graphed.decode(rows), eager.decode(rows), strict=True):
            np.testing.assert_array_equal(replayed, launched)


def test_chunk_sizes_and_mates_change_nothing(model, graphed):
    for stream, wave in zip(STREAMS, play(graphed, STREAMS), strict=True):
        alone = stream.wave(graphed)
        assert np.abs(wave - alone).max() <= 1e-3
        assert snr_db(wave, reference(model, stream.codes)) >= MIN_SNR_DB


def test_equal_mates_give_equal_bits_in_every_row(graphed):
    given = codes(25, seed=0)
    first, *others = graphed.decode([Row(slot, 0, given) for slot in range(8)])
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_a_slot_used_again_has_no_trace_of_its_last_session(graphed):
    stream = Stream(3, codes(40, seed=7), [4, 8])
    first = stream.wave(graphed)
    Stream(3, codes(100, seed=8), [25]).wave(graphed)
    np.testing.assert_array_equal(first, stream.wave(graphed))


def test_10_000_frames_in_constant_memory_equal_one_full_pass(model, graphed):
    """Beyond max_position_embeddings (8,000), which is no limit: angles are absolute, in float32."""
    given = codes(10_000, seed=9)
    parts = []
    for start in range(0, len(given), 25):
        [wave] = graphed.decode([Row(0, start, given[start : start + 25])], lambda samples: samples)
        parts.append(wave)
        if start == 25:
            used = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == used
    wave = np.concatenate(parts)
    assert snr_db(wave, reference(model, given)) >= MIN_SNR_DB

    engine = StreamingEngine(graphed, max_sessions=SLOTS, idle_timeout_s=900)
    assert np.abs(engine.decode_full(given) - wave).max() <= 1e-3


def test_the_engine_decodes_a_ragged_batch(graphed, model):
    engine = StreamingEngine(graphed, max_sessions=SLOTS, idle_timeout_s=900)
    chunks = [CodesChunk(str(n), codes(n, seed=n), start=True, end=True) for n in (1, 4, 4, 8, 25, 33)]
    for chunk, samples in zip(chunks, engine.decode(chunks), strict=True):
        assert samples.dtype == np.int16
        assert snr_db(samples / 32_767, reference(model, chunk.codes)) >= MIN_SNR_DB
    assert engine.stats()["slots_free"] == SLOTS
