from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.pipeline.support import HELLO, LIMIT_S
from triton_omni.errors import InvalidRequestError, NotFoundError, OmniError, RequestTimeoutError, StageError
from triton_omni.pipeline.local import LocalCode2Wav, LocalTalker, LocalThinker
from triton_omni.pipeline.null import (
    NullCode2Wav,
    NullCode2WavConfig,
    NullTalker,
    NullTalkerConfig,
    NullThinker,
    NullThinkerConfig,
)
from triton_omni.pipeline.stages import NO_IDS, CodesChunk, CodesEvent, Int16, TalkerStart, ThinkerRequest
from triton_omni.sampling import TalkerSampling, ThinkerSampling

IDS = np.arange(10, dtype=np.int32)


def start(ids: int, finished: bool, **sampling: int) -> TalkerStart:
    return TalkerStart(IDS, "ethan", TalkerSampling(**sampling), (4, 8), None, IDS[:ids], finished)


@pytest.fixture
def talker() -> Iterator[NullTalker]:
    engine = NullTalker(NullTalkerConfig(frame_ms=0.5, frames_per_token=2, max_sessions=1))
    yield engine
    engine.close()


def test_nothing_here_loads_torch() -> None:
    modules = "triton_omni.pipeline.null, triton_omni.pipeline.pipeline, triton_omni.pipeline.local, triton_omni.local"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_thinker_keeps_its_pace_and_its_limit() -> None:
    engine = NullThinker(NullThinkerConfig(token_ms=5, prefill_ms=10, answer_tokens=20))
    stage = LocalThinker(engine)
    began_s = time.monotonic()
    events = list(stage.generate(ThinkerRequest("a", HELLO)))
    assert time.monotonic() - began_s >= 0.010 + 19 * 0.005
    assert events[0].prompt_token_ids is not None
    assert np.concatenate([e.token_ids for e in events]).tolist() == list(range(1000, 1020))
    assert events[-1].finish_reason == "stop"
    events = list(stage.generate(ThinkerRequest("a", HELLO, sampling=ThinkerSampling(max_tokens=3))))
    assert events[-1].finish_reason == "length"
    assert sum(e.token_ids.size for e in events) == 3
    engine.close()
    with pytest.raises(StageError, match="closed"):
        list(stage.generate(ThinkerRequest("b", HELLO)))


def test_rows_of_the_thinker_come_once() -> None:
    engine = NullThinker(NullThinkerConfig(token_ms=0, prefill_ms=1))
    list(LocalThinker(engine).generate(ThinkerRequest("a", HELLO, want_rows=True)))
    assert engine.rows("a", 1).rows.nbytes == 4 * 8 * 4
    with pytest.raises(NotFoundError):
        engine.rows("a", 1)
    engine.close()
    slow = NullThinker(NullThinkerConfig(prefill_ms=60_000))
    slow.submit(ThinkerRequest("a", HELLO, want_rows=True), lambda event: None)
    with pytest.raises(RequestTimeoutError):
        slow.rows("a", 0.01)
    slow.close()


def test_talker_waits_for_text_and_never_runs_ahead_of_it(talker: NullTalker) -> None:
    events: list[CodesEvent | OmniError] = []
    came = threading.Semaphore(0)

    def sink(event: CodesEvent | OmniError) -> None:
        events.append(event)
        came.release()

    talker.start("a", start(3, False), sink)
    assert not came.acquire(timeout=0.05)  # three ids make three frames, and a chunk needs four
    talker.append("a", IDS[:1], False)
    assert came.acquire(timeout=LIMIT_S)
    assert talker.stats()["running"] == 1
    talker.append("a", NO_IDS, True)
    assert came.acquire(timeout=LIMIT_S)
    assert [len(e.codes) for e in events if isinstance(e, CodesEvent)] == [4, 4]
    assert isinstance(events[-1], CodesEvent)
    assert events[-1].finish_reason == "stop"
    talker.append("a", IDS, False)  # too late, and no error
    assert talker.stats() == {"running": 0, "waiting": 0, "waiting_for_text": 0, "slots_free": 1}


def test_talker_limits_and_slots(talker: NullTalker) -> None:
    stage = LocalTalker(talker)
    cut = list(stage.start("a", start(10, True, max_frames=7)))
    assert [(len(e.codes), e.finish_reason) for e in cut] == [(4, None), (3, "length")]
    padded = list(stage.start("a", start(1, True, min_frames=5)))
    assert sum(len(e.codes) for e in padded) == 5
    assert [len(e.codes) for e in stage.start("a", start(0, True))] == [0]
    first, second = stage.start("a", start(2, False)), stage.start("b", start(2, True))
    assert talker.stats()["waiting"] == 1
    stage.end("a", cancel=True)
    assert [e.finish_reason for e in first] == ["cancelled"]
    assert [e.finish_reason for e in second] == ["stop"]


def test_a_talker_session_without_text_gives_its_slot_to_one_with_text(talker: NullTalker) -> None:
    stage = LocalTalker(talker)
    bare = [stage.start(name, start(0, False)) for name in ("a", "b")]
    assert talker.stats() == {"running": 1, "waiting": 0, "waiting_for_text": 2, "slots_free": 0}
    assert sum(len(e.codes) for e in stage.start("c", start(2, True))) == 4
    begun = stage.start("d", start(2, False))
    assert talker.stats() == {"running": 1, "waiting": 0, "waiting_for_text": 2, "slots_free": 0}
    stage.append("b", IDS[:1], True)
    assert talker.stats() == {"running": 1, "waiting": 1, "waiting_for_text": 1, "slots_free": 0}
    stage.append("d", NO_IDS, True)
    assert [sum(len(e.codes) for e in events) for events in (begun, bare[1])] == [4, 2]
    stage.append("a", NO_IDS, True)
    assert [len(e.codes) for e in bare[0]] == [0]
    assert talker.stats() == {"running": 0, "waiting": 0, "waiting_for_text": 0, "slots_free": 1}


def test_code2wav_has_the_real_decoder_s_lengths_and_errors() -> None:
    engine = NullCode2Wav()
    codes = np.zeros((3, 16), np.int32)
    waves = [wave_of(engine, CodesChunk("a", codes[:n], start=i == 0)) for i, n in enumerate((1, 3, 0, 2))]
    assert [wave.size for wave in waves] == [1920 - 555, 3 * 1920, 0, 2 * 1920]
    assert wave_of(engine, CodesChunk("a", codes[:0], end=True)).size == 0
    assert engine.stats() == {"running": 0}
    whole = wave_of(engine, CodesChunk("b", np.zeros((6, 16), np.int32), start=True, end=True))
    assert np.array_equal(np.concatenate(waves), whole)
    assert np.abs(whole).max() > 1000
    silent = NullCode2Wav(NullCode2WavConfig(tone_hz=0))
    assert not wave_of(silent, CodesChunk("b", codes, start=True, end=True)).any()
    unknown, wrong = engine.decode([CodesChunk("x", codes), CodesChunk("y", codes[:, :3], start=True)])
    assert isinstance(unknown, NotFoundError)
    assert isinstance(wrong, InvalidRequestError)


def wave_of(engine: NullCode2Wav, chunk: CodesChunk) -> Int16:
    [wave] = engine.decode([chunk])
    assert isinstance(wave, np.ndarray), wave
    return wave


def test_configurations_name_what_is_wrong() -> None:
    for make, field in (
        (lambda: NullThinkerConfig(token_ms=-1), "token_ms"),
        (lambda: NullTalkerConfig(max_sessions=0), "max_sessions"),
        (lambda: NullTalkerConfig(frame_ms=float("inf")), "frame_ms"),
        (lambda: NullCode2WavConfig(code_groups=0), "code_groups"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            make()
        assert caught.value.field == field


class Gate:
    """A vocoder engine that holds its first batch until told, and notes the batches it gets."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def decode(self, chunks: list[CodesChunk]) -> list[Int16 | OmniError]:
        self.batches.append([chunk.session_id for chunk in chunks])
        if len(self.batches) == 1:
            self.entered.set()
            assert self.go_on.wait(LIMIT_S)
        if any(chunk.session_id == "bad" for chunk in chunks) and len(chunks) == 1:
            raise RuntimeError("the forward failed")
        return [np.full(1, int(c.session_id), np.int16) if c.session_id.isdigit() else _BAD for c in chunks]

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


_BAD = StageError("code2wav", "bad chunk")


def test_chunks_that_wait_form_one_batch_and_each_gets_its_own_result() -> None:
    gate = Gate()
    stage = LocalCode2Wav(gate)
    results: dict[str, Int16 | Exception] = {}

    def decode(session_id: str) -> None:
        try:
            results[session_id] = stage.decode(CodesChunk(session_id, np.zeros((1, 16), np.int32)))
        except Exception as error:
            results[session_id] = error

    threads = [threading.Thread(target=decode, args=(str(i),)) for i in range(6)]
    threads.append(threading.Thread(target=decode, args=("bad",)))
    threads[0].start()
    assert gate.entered.wait(LIMIT_S)
    for thread in threads[1:]:
        thread.start()
    limit_s = time.monotonic() + LIMIT_S
    while len(stage._waiting) < 6:
        assert time.monotonic() < limit_s
        threading.Event().wait(0.001)
    gate.go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [len(batch) for batch in gate.batches] == [1, 6]
    assert results.pop("bad") is _BAD
    assert {name: int(np.asarray(result)[0]) for name, result in results.items()} == {str(i): i for i in range(6)}
    with pytest.raises(RuntimeError, match="forward failed"):
        stage.decode(CodesChunk("bad", np.zeros((1, 16), np.int32)))
