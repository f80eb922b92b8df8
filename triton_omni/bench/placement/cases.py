"""The cases: each engine alone, both on one GPU, each on a GPU of its own, both under MPS."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from triton_omni.bench.placement import mps
from triton_omni.bench.placement.loads import Limit, Load, Settings, Spans, Times
from triton_omni.bench.placement.processes import Worker, new_pace
from triton_omni.errors import StageError
from triton_omni.pipeline.chunk_policy import FRAME_S

Row = dict[str, Any]
ALONE, TOGETHER, APART, MPS = "alone", "together", "two_gpus", "mps"
TALKER, CODE2WAV, CODE2WAV_APART = "talker", "code2wav", "code2wav apart"
# Of code2wav alone; together it is called for as long as the talker runs.
CALLS_ALONE = 40
# Beside a load itself: prompts, the first calls, a last step.
_OVERHEAD_S = 3.0
_EXIT_S = 10.0


def loads(batches: Sequence[int], limit_s: float) -> list[Load]:
    """How both are run together: for each batch code2wav takes all sessions whenever the talker has made their frames,
    or a quarter of them four times as often where such calls are measured too, or makes one call after the other.
    """
    found = []
    for batch in batches:
        found.append(Load(batch, batch, True, limit_s))
        if batch % 4 == 0 and batch // 4 in batches:
            found.append(Load(batch, batch // 4, True, limit_s))
        found.append(Load(batch, batch, False, limit_s))
    return found


class Bench:
    """The processes of a measurement, all built at the same time; a context manager. ``apart``: one more code2wav, on
    the second GPU; ``environment``: of all of them.

    Raises: StageError when a process fails, TimeoutError when ``limit`` is reached, or would be before a case ends.
    """

    def __init__(
        self, settings: Settings, limit: Limit, *, apart: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self._settings, self._limit, self._pace = settings, limit, new_pace()
        self._environment = environment or {}
        self._gpus = {TALKER: 0, CODE2WAV: 0, **({CODE2WAV_APART: 1} if apart else {})}
        self._workers: dict[str, Worker] = {}
        self._device = ""

    def __enter__(self) -> Self:
        for name, gpu in self._gpus.items():
            environment = {**self._environment, **({} if self._settings.device == "cpu" else only_gpu(gpu))}
            side = TALKER if name == TALKER else CODE2WAV
            self._workers[name] = Worker(side, self._settings, self._pace, environment)
        try:
            for worker in self._workers.values():
                self._device = worker.built(self._limit)
        except BaseException:
            self._close(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(_EXIT_S if error is None else 0.0)

    def _close(self, wait_s: float) -> None:
        for worker in self._workers.values():
            worker.finish()
        for worker in self._workers.values():
            worker.close(wait_s=wait_s)

    def measure(self, case: str, load: Load, *names: str) -> list[Row]:
        """A row for each of the workers ``names``; the talker comes first, and its end is that of the others."""
        if self._limit.left_s < load.limit_s + _OVERHEAD_S:
            raise TimeoutError(f"{self._limit.left_s:.0f} s are left, too few for one more case")
        workers = [self._workers[name] for name in names]
        self._pace.reset()
        for worker in workers:
            worker.prepare(load)
        for worker in workers:
            worker.ready(self._limit)
        for worker in workers:
            worker.go()
        measured: list[Times] = []
        for worker in workers:
            measured.append(worker.times(self._limit))
            self._pace.stop()
        said = {"case": case, "pace": load.pace if len(workers) > 1 else None}
        rows = [self._row(worker.side, load, times, measured) for worker, times in zip(workers, measured, strict=True)]
        return [said | row | {"gpu": self._device} for row in rows]

    def _row(self, side: str, load: Load, times: Times, measured: Sequence[Times]) -> Row:
        batches = {TALKER: load.sessions, CODE2WAV: load.rows}
        batch = batches.pop(side)
        frames = 1 if side == TALKER else self._settings.chunk_frames
        return {
            "process": side,
            "batch": batch,
            "frames": frames,
            "context": self._settings.context if side == TALKER else None,
            "beside": None if len(measured) == 1 else next(iter(batches.values())),
            **figures(times.within(measured), batch * frames * FRAME_S),
        }


def figures(spans: Spans, audio_s: float) -> Row:
    """Of steps or calls that make ``audio_s`` each; None where there are too few. The rate is that of their beginnings,
    so that waiting for the next one to be due counts.
    """
    times_ms = [1e3 * (end - begin) for begin, end in spans]
    p50_ms, p99_ms = np.percentile(times_ms, (50, 99)).tolist() if spans else (None, None)
    rate = (len(spans) - 1) / (spans[-1][0] - spans[0][0]) if len(spans) > 1 else None
    return {
        "steps": len(spans),
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "steps_per_s": rate,
        "audio_s_per_s": None if rate is None else rate * audio_s,
    }


def only_gpu(index: int) -> Mapping[str, str]:
    """The environment in which the ``index``-th of this process' GPUs is the only one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)}


def measure_all(
    settings: Settings, limit: Limit, case_s: float, *, apart: bool, under_mps: bool, left_out: dict[str, str]
) -> Iterator[list[Row]]:
    """The rows of one case after the other; ``apart``, with a second GPU, only at the first batch. ``left_out`` gets
    the reason for what is not measured.

    Raises: StageError when a process fails, but under MPS.
    """
    case = ALONE
    try:
        with Bench(settings, limit, apart=apart) as bench:
            for batch in settings.batches:
                yield bench.measure(case, Load(batch, batch, False, case_s), TALKER)
                yield bench.measure(case, Load(batch, batch, False, case_s, CALLS_ALONE), CODE2WAV)
            case = TOGETHER
            for load in loads(settings.batches, case_s):
                yield bench.measure(case, load, TALKER, CODE2WAV)
            if apart:
                case = APART
                for load in loads(settings.batches[:1], case_s):
                    yield bench.measure(case, load, TALKER, CODE2WAV_APART)
        case = MPS
        if under_mps:
            with mps.daemon() as daemon, Bench(settings, limit, environment=daemon.environment) as bench:
                daemon.check_clients()
                for load in loads(settings.batches, case_s):
                    yield bench.measure(case, load, TALKER, CODE2WAV)
    except TimeoutError as error:
        left_out[f"rest of {case}, and all behind it"] = str(error)
    except StageError as error:
        if case != MPS:
            raise
        left_out[MPS] = error.to_wire()
