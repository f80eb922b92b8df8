from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.code2wav.streams import cut, final_samples, random_codes
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.code2wav.engine import StreamingEngine
from triton_omni.code2wav.factory import load_code2wav
from triton_omni.code2wav.runner import Runner, to_int16
from triton_omni.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    StageError,
)
from triton_omni.model_config import ModelConfig
from triton_omni.options import from_mapping
from triton_omni.pipeline.stages import CodesChunk

MAX_SESSIONS = 3


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(runner, clock: Clock) -> StreamingEngine:
    return StreamingEngine(runner(torch.float32), max_sessions=MAX_SESSIONS, idle_timeout_s=60, clock=clock)


@pytest.fixture
def codes(config: ModelConfig) -> np.ndarray:
    return random_codes(config, 30, seed=0)


@pytest.fixture
def expected(reference, codes) -> np.ndarray:
    return np.round(reference(torch.float32, codes) * 32767)


def assert_sounds_like(pcm, expected: np.ndarray) -> None:
    """int16 within the tolerance of float32 and half a step."""
    assert isinstance(pcm, np.ndarray), pcm
    assert (pcm.dtype, pcm.shape) == (np.int16, expected.shape)
    np.testing.assert_allclose(pcm, expected, rtol=0, atol=3e-4 * 32767 + 1)


def decode(engine: StreamingEngine, *chunks: CodesChunk):
    return engine.decode(chunks)


def free(engine: StreamingEngine) -> int:
    return engine.stats()["slots_free"]


def test_a_session_in_chunks(engine, codes, expected, shape):
    pieces = []
    for i, piece in enumerate(cut(codes, [4, 8, 16])):
        [pcm] = decode(engine, CodesChunk("a", piece, start=i == 0, end=False))
        assert engine.stats() == {"running": 1, "slots_free": MAX_SESSIONS - 1, "expired": 0}
        pieces.append(pcm)
    assert len(pieces[0]) == final_samples(shape, 4)
    [rest] = decode(engine, CodesChunk("a", codes[:0], end=True))
    assert (rest.dtype, rest.shape) == (np.int16, (0,))
    assert_sounds_like(np.concatenate(pieces), expected)
    assert free(engine) == MAX_SESSIONS


def test_one_chunk_can_be_a_whole_utterance(engine, codes, expected):
    [pcm] = decode(engine, CodesChunk("a", codes, start=True, end=True))
    assert_sounds_like(pcm, expected)
    assert free(engine) == MAX_SESSIONS


def test_an_utterance_without_frames_is_silent(engine, codes):
    [pcm] = decode(engine, CodesChunk("a", codes[:0], start=True, end=True))
    assert len(pcm) == 0
    assert free(engine) == MAX_SESSIONS


def test_a_session_may_start_without_frames(engine, codes, expected):
    decode(engine, CodesChunk("a", codes[:0], start=True))
    [pcm] = decode(engine, CodesChunk("a", codes, end=True))
    assert_sounds_like(pcm, expected)


def test_results_come_in_the_order_of_their_chunks(engine, codes, expected, shape):
    chunks = [CodesChunk(f"{n}", codes[:n], start=True, end=True) for n in (25, 4, 0)]
    for n, pcm in zip((25, 4, 0), decode(engine, *chunks), strict=True):
        assert_sounds_like(pcm, expected[: final_samples(shape, n)])


def test_chunks_of_one_session_in_one_call_follow_each_other(engine, codes, expected):
    pieces = list(cut(codes, [4, 8, 25]))
    chunks = [CodesChunk("a", piece, start=i == 0, end=i == 2) for i, piece in enumerate(pieces)]
    chunks.insert(1, CodesChunk("b", codes, start=True, end=True))
    results = decode(engine, *chunks)
    assert_sounds_like(results.pop(1), expected)
    assert_sounds_like(np.concatenate(results), expected)


def test_more_utterances_than_slots_in_one_call(engine, codes, expected):
    results = decode(engine, *(CodesChunk(f"{i}", codes, start=True, end=True) for i in range(2 * MAX_SESSIONS + 1)))
    for pcm in results:
        assert_sounds_like(pcm, expected)


def bad(codes: np.ndarray, value: int) -> np.ndarray:
    changed = codes.copy()
    changed[2, 5] = value
    return changed


class TestARefusedChunk:
    """Tells its caller why, and changes nothing for its batch mates or its own session."""

    @pytest.mark.parametrize("value", [-1, 2**20])
    def test_code_out_of_range(self, value, engine, codes, expected, shape):
        error, mate = decode(
            engine, CodesChunk("a", bad(codes, value), start=True), CodesChunk("b", codes, start=True, end=True)
        )
        assert isinstance(error, InvalidRequestError)
        assert error.field == "codes"
        for told in (str(value), f"0..{shape.codebook_size - 1}", "frame 2", "group 5"):
            assert told in error.message
        assert_sounds_like(mate, expected)
        assert free(engine) == MAX_SESSIONS

    @pytest.mark.parametrize("change", [lambda c: c[:, :-1], lambda c: c.ravel(), lambda c: c.astype(np.float32)])
    def test_wrong_shape_or_dtype(self, change, engine, codes, shape):
        [error] = decode(engine, CodesChunk("a", change(codes), start=True))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "codes"
        assert f"[frames, {shape.code_groups}]" in error.message

    def test_its_session_goes_on(self, engine, codes, expected):
        [first] = decode(engine, CodesChunk("a", codes[:10], start=True))
        [error] = decode(engine, CodesChunk("a", bad(codes, -1)))
        [second] = decode(engine, CodesChunk("a", codes[10:], end=True))
        assert isinstance(error, InvalidRequestError)
        assert_sounds_like(np.concatenate([first, second]), expected)

    def test_its_end_counts_all_the_same(self, engine, codes):
        decode(engine, CodesChunk("a", codes[:4], start=True))
        [error] = decode(engine, CodesChunk("a", bad(codes, -1), end=True))
        assert isinstance(error, InvalidRequestError)
        assert free(engine) == MAX_SESSIONS

    def test_unknown_session(self, engine, codes, expected):
        error, mate = decode(engine, CodesChunk("a", codes), CodesChunk("b", codes, start=True, end=True))
        assert isinstance(error, NotFoundError)
        assert (error.field, "'a'" in error.message) == ("session_id", True)
        assert_sounds_like(mate, expected)

    def test_start_of_a_live_session(self, engine, codes, expected):
        [first] = decode(engine, CodesChunk("a", codes[:10], start=True))
        [error] = decode(engine, CodesChunk("a", codes, start=True, end=True))
        [second] = decode(engine, CodesChunk("a", codes[10:], end=True))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "start"
        assert_sounds_like(np.concatenate([first, second]), expected)

    def test_no_slot_free(self, engine, codes, expected):
        decode(engine, *(CodesChunk(f"{i}", codes[:1], start=True) for i in range(MAX_SESSIONS)))
        error, mate = decode(engine, CodesChunk("late", codes, start=True), CodesChunk("0", codes[1:], end=True))
        assert isinstance(error, CapacityError)
        assert str(MAX_SESSIONS) in error.message
        assert len(mate) > 0
        [pcm] = decode(engine, CodesChunk("late", codes, start=True, end=True))
        assert_sounds_like(pcm, expected)


def test_idle_sessions_expire(engine, clock, codes, expected):
    decode(engine, *(CodesChunk(f"{i}", codes[:10], start=True) for i in range(MAX_SESSIONS)))
    clock.now_s = 40
    [first] = decode(engine, CodesChunk("0", codes[:0]))
    assert len(first) == 0
    clock.now_s = 70
    assert engine.stats() == {"running": 1, "slots_free": MAX_SESSIONS - 1, "expired": MAX_SESSIONS - 1}
    lost, pcm = decode(engine, CodesChunk("1", codes[10:]), CodesChunk("new", codes, start=True, end=True))
    assert isinstance(lost, NotFoundError)
    assert "60 s" in lost.message
    assert_sounds_like(pcm, expected)


def test_a_failed_forward_closes_its_sessions_only(runner, clock, codes, expected, monkeypatch):
    broken = Runner(runner(torch.float32).model, max_step_frames=64)
    engine = StreamingEngine(broken, max_sessions=MAX_SESSIONS, idle_timeout_s=60, clock=clock)
    [first] = decode(engine, CodesChunk("a", codes[:10], start=True))

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(broken, "decode", fail)
        errors = decode(engine, CodesChunk("b", codes, start=True), CodesChunk("c", codes, start=True))
    assert all(isinstance(error, StageError) and "out of memory" in error.message for error in errors)
    assert free(engine) == MAX_SESSIONS - 1
    [second] = decode(engine, CodesChunk("a", codes[10:], end=True))
    assert_sounds_like(np.concatenate([first, second]), expected)


def test_calls_from_several_threads(engine, codes, expected):
    waves: dict[str, np.ndarray] = {}

    def speak(name: str) -> None:
        pieces = list(cut(codes, [4, 8, 16]))
        results = [
            decode(engine, CodesChunk(name, piece, start=i == 0, end=i == len(pieces) - 1))[0]
            for i, piece in enumerate(pieces)
        ]
        waves[name] = np.concatenate(results)

    threads = [threading.Thread(target=speak, args=(f"{i}",)) for i in range(MAX_SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(waves) == MAX_SESSIONS
    for pcm in waves.values():
        assert_sounds_like(pcm, expected)


def test_close_drops_everything(engine, codes):
    decode(engine, CodesChunk("a", codes, start=True))
    engine.close()
    [error] = decode(engine, CodesChunk("a", codes))
    assert isinstance(error, StageError)
    assert engine.stats()["running"] == 0
    with pytest.raises(StageError):
        engine.decode_full(codes)


def test_int16_is_the_nearest_step():
    wave = torch.tensor([-1, 1, 0, 0.4 / 32767, 0.6 / 32767, -0.6 / 32767, 1.6 / 32767])
    pcm = to_int16(wave)
    assert pcm.dtype == torch.int16
    assert pcm.tolist() == [-32767, 32767, 0, 0, 1, -1, 2]


@pytest.mark.parity
@pytest.mark.parametrize("frames", [0, 1, 30, 150])
def test_decode_full_equals_one_pass(frames, engine, config, reference):
    codes = random_codes(config, frames, seed=3)
    wave = engine.decode_full(codes)
    expected = reference(torch.float32, codes) if frames else np.zeros(0, np.float32)
    assert (wave.dtype, wave.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(wave, expected, rtol=0, atol=3e-4)
    assert free(engine) == MAX_SESSIONS


def test_decode_full_raises_what_decode_returns(engine, codes):
    with pytest.raises(InvalidRequestError, match="must lie in"):
        engine.decode_full(bad(codes, -1))
    decode(engine, *(CodesChunk(f"{i}", codes[:1], start=True) for i in range(MAX_SESSIONS)))
    with pytest.raises(CapacityError):
        engine.decode_full(codes)


def test_factory_loads_a_working_engine(config, codes, expected):
    engine = load_code2wav(config, Code2WavConfig(max_sessions=2, device="cpu"))
    [pcm] = decode(engine, CodesChunk("a", codes, start=True, end=True))
    assert_sounds_like(pcm, expected)
    assert engine.stats()["slots_free"] == 2


def test_factory_refuses_a_talker_with_other_code_groups(config):
    raw = {**config.raw, "talker_config": {**config.talker, "num_code_groups": 3}}
    with pytest.raises(CheckpointError, match="3 code groups"):
        load_code2wav(ModelConfig(config.path, raw, config.generation))


@pytest.mark.parametrize(
    ("field", "value"), [("max_sessions", 0), ("max_step_frames", 0), ("dtype", "int8"), ("idle_timeout_s", 0.0)]
)
def test_config_names_what_is_wrong(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        from_mapping(Code2WavConfig, {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("device", ["tpu9", "cuda:99"])
def test_device_that_is_not_there(device):
    with pytest.raises(ConfigError, match=device):
        Code2WavConfig(device=device).torch_device()
