"""Figures of a decoupled model from what perf_analyzer exports, and of the models below it from Triton's statistics.

perf_analyzer's own table counts a request until its last response and knows nothing of the responses between; Triton's
durations of a decoupled model end when ``execute`` has taken the request over.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SAMPLES_PER_S = 24_000


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One load of one model: concurrent requests, or requests per second. Times are from the request, in ms: medians
    and 99th percentiles; gap: between two responses of a request; first audio: samples, or the talker's codes;
    ``audio_s``: seconds of speech in a request, on average.
    """

    load: str
    requests: int
    responses: int
    requests_per_s: float
    responses_per_s: float
    first_response_ms: float
    first_response_p99_ms: float
    last_response_ms: float
    last_response_p99_ms: float
    gap_ms: float | None
    gap_p99_ms: float | None
    first_text_ms: float | None
    first_audio_ms: float | None
    audio_s: float | None
    audio_s_per_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """What a model was asked while the measured one ran: ``requests`` per request of that one; ms per request."""

    model: str
    requests: float
    queue_ms: float
    execute_ms: float
    batch: float


def levels(profile: Mapping[str, Any]) -> list[Level]:
    """Every experiment of an exported profile. Raises ValueError when one has no request with a response."""
    return [_level(one["experiment"], one["requests"]) for one in profile["experiments"]]


def _level(experiment: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> Level:
    answered = [one for one in requests if one["response_timestamps"]]
    load = f"{experiment['mode'].replace('_', ' ')} {experiment['value']}"
    if not answered:
        raise ValueError(f"no request of {load} got a response")
    began_ns = min(one["timestamp"] for one in answered)
    ended_ns = max(one["response_timestamps"][-1] for one in answered)
    wall_s = (ended_ns - began_ns) / 1e9
    times_ms = [[(at - one["timestamp"]) / 1e6 for at in one["response_timestamps"]] for one in answered]
    gaps_ms = [later - earlier for times in times_ms for earlier, later in itertools.pairwise(times)]
    responses = sum(len(times) for times in times_ms)
    samples = sum(_samples(output) for one in answered for output in one["response_outputs"])
    return Level(
        load=load,
        requests=len(answered),
        responses=responses,
        requests_per_s=round(len(answered) / wall_s, 3),
        responses_per_s=round(responses / wall_s, 2),
        first_response_ms=_median(times[0] for times in times_ms),
        first_response_p99_ms=_p99(times[0] for times in times_ms),
        last_response_ms=_median(times[-1] for times in times_ms),
        last_response_p99_ms=_p99(times[-1] for times in times_ms),
        gap_ms=_median(gaps_ms) if gaps_ms else None,
        gap_p99_ms=_p99(gaps_ms) if gaps_ms else None,
        first_text_ms=_first(answered, times_ms, "TEXT"),
        first_audio_ms=_first(answered, times_ms, "AUDIO", "CODES"),
        audio_s=round(samples / SAMPLES_PER_S / len(answered), 3) if samples else None,
        audio_s_per_s=round(samples / SAMPLES_PER_S / wall_s, 2) if samples else None,
    )


def _first(requests: Sequence[Mapping[str, Any]], times_ms: Sequence[Sequence[float]], *names: str) -> float | None:
    """Median time of the first response with something in one of these outputs."""
    found: list[float] = []
    for one, times in zip(requests, times_ms, strict=True):
        told = (
            at
            for at, values in zip(times, one["response_outputs"], strict=True)
            if any(values.get(name, "") != "" for name in names)
        )
        found += itertools.islice(told, 1)
    return _median(found) if found else None


def _samples(output: Mapping[str, Any]) -> int:
    """perf_analyzer writes an empty tensor as "", and one of a single element as that element."""
    audio = output.get("AUDIO", "")
    return len(audio) if isinstance(audio, list) else int(audio != "")


def children(before: Mapping[str, Any], after: Mapping[str, Any], parent: str) -> list[Child]:
    """The differences of Triton's statistics, model name -> ModelStatistics as a mapping; ``parent`` is not listed."""
    parents = _grown(before, after, parent, "inference_count")
    found = []
    for model in after:
        count = _grown(before, after, model, "inference_count")
        if model == parent or not count or not parents:
            continue
        took_ms = {
            part: _grown(before, after, model, "inference_stats", part, "ns") / count / 1e6
            for part in ("queue", "compute_input", "compute_infer", "compute_output")
        }
        found.append(
            Child(
                model=model,
                requests=round(count / parents, 2),
                queue_ms=round(took_ms.pop("queue"), 3),
                execute_ms=round(sum(took_ms.values()), 3),
                batch=round(count / max(_grown(before, after, model, "execution_count"), 1), 2),
            )
        )
    return found


def _grown(before: Mapping[str, Any], after: Mapping[str, Any], *path: str) -> int:
    """Protocol buffers' JSON leaves zeros out and writes 64-bit integers as strings."""
    values = []
    for tree in (before, after):
        node: Any = tree
        for key in path:
            node = node.get(key, {})
        values.append(int(node or 0))
    return values[1] - values[0]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Right-aligned columns; None is a dash."""
    rows = list(rows)
    head = list(rows[0])
    lines = [head, *(["-" if row[key] is None else str(row[key]) for key in head] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3)
