"""The sweep's results: JSON lines while it runs; from them a JSON file, a page and a picture."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from triton_omni.bench.figures import DEFINITIONS
from triton_omni.bench.report import Row, rounded
from triton_omni.sweep.rows import OTHER, PROFILE, ROWS

LONG_FORM = "long_form"
_HEAD = ("row", "c", "requests", "failed", "req/s", "audio s/s", "TTFT ms", "TTFP ms", "p99", "RTF", "E2E s", "stalls")
_LABELS = {
    OTHER: "vLLM-Omni",
    "no_batch": "no batch",
    "batch": "+ batch",
    "cuda_graph": "+ CUDA graph",
    "async_chunk": "+ async chunk",
    "async_output": "+ async output",
    "replicas": "+ replicas",
    PROFILE: "the profile",
}


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of rows for one point the last, in the order of the ablation; rows of one's own follow."""
    points = {(row["gpus"], row["config"], row["concurrency"]): row for row in rows}
    names = dict.fromkeys((OTHER, *ROWS, PROFILE, *(row["config"] for row in rows)))
    order = {name: place for place, name in enumerate(names)}

    def place(row: Row) -> tuple[str, int, int]:
        return row["gpus"], order[row["config"]], row["concurrency"]

    return sorted(points.values(), key=place)


def write(rows: Sequence[Row], directory: Path) -> None:
    """``sweep.json``, ``sweep.md`` and, where matplotlib is installed, ``sweep.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    chosen = latest(rows)
    lines = ",\n ".join(json.dumps(rounded(row)) for row in chosen)
    (directory / "sweep.json").write_text(f"[{lines}]\n", encoding="utf-8")
    points = [row for row in chosen if row["config"] != LONG_FORM]
    drawn = bool(points) and importlib.util.find_spec("matplotlib") is not None
    if drawn:
        from triton_omni.bench.plots import plot

        plot(
            [row | {"system": "", "config": _LABELS.get(str(row["config"]), str(row["config"]))} for row in points],
            directory / "sweep.png",
        )
    (directory / "sweep.md").write_text(_page(chosen, picture=drawn), encoding="utf-8")


def _page(rows: Sequence[Row], *, picture: bool) -> str:
    long = [row for row in rows if row["config"] == LONG_FORM]
    rows = [row for row in rows if row["config"] != LONG_FORM]
    parts = [
        "# The ablation\n",
        "Each row with a plus switches one optimisation on, on top of those above it; a row without is a layout of its",
        "own (*the profile*: what `serve.sh` takes). Measured by the client of `scripts/bench.py`: closed loop,",
        "one wave of warm-up at each concurrency `c`.\n",
    ]
    if picture:
        parts.append("![Throughput, real-time factor and time to first audio over concurrency](sweep.png)\n")
    for gpus in dict.fromkeys(row["gpus"] for row in rows):
        mine = [row for row in rows if row["gpus"] == gpus]
        parts += [f"## {'CPU' if gpus == 'none' else gpus}\n", *_table(mine), ""]
        parts += ["Measured by\n", *(f"    {line}" for line in dict.fromkeys(_source(row) for row in mine)), ""]
        asked = dict.fromkeys(_workload(row) for row in mine)
        parts += [*asked, ""]
    for row in long:
        parts += _long_form(row)
    return "\n".join([*parts, "## Definitions\n", "TTFP p99 stands beside its mean; the others are means.\n"]) + (
        "\n" + "\n".join(f"    {line}" for line in DEFINITIONS.splitlines()) + "\n"
    )


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| " + " | ".join(_HEAD) + " |", "| --- |" + " ---: |" * (len(_HEAD) - 1)]
    for row in rows:
        name = str(row["config"])
        cells = [_LABELS.get(name, name), str(row["concurrency"]), str(row["completed"]), str(row["failed"])]
        cells += [_number(row, "req_s", 2), _number(row, "audio_s_per_s", 1)]
        cells += [_number(row, key, 0) for key in ("ttft_ms", "ttfp_ms", "ttfp_p99_ms")]
        cells += [_number(row, "rtf", 3), _number(row, "e2e_ms", 2, 1e-3), str(row["underruns"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _long_form(row: Row) -> list[str]:
    quarters = ", ".join(f"{rtf:.3f}" for rtf in row["rtf_by_quarter"])
    return [
        f"## One long request, {'CPU' if row['gpus'] == 'none' else row['gpus']}\n",
        f"{_workload(row)} E2E {row['e2e_ms'] / 1e3:.2f} s, TTFT {row['ttft_ms']:.0f} ms,",
        f"TTFP {row['ttfp_ms']:.0f} ms, RTF {row['rtf']:.3f}; time per second of speech in each quarter of the answer:",
        f"{quarters}.\n",
        f"    {_source(row)}\n",
    ]


def _number(row: Row, key: str, digits: int, scale: float = 1.0) -> str:
    return "-" if row.get(key) is None else f"{row[key] * scale:,.{digits}f}"


def _source(row: Row) -> str:
    return f"{row['command']}    # {row['commit']}"


def _workload(row: Row) -> str:
    return (
        f"Workload: prompts of {row['prompt_tokens']:.0f} tokens, {row['text_tokens']:.0f} text tokens, "
        f"{row['audio_s']:.1f} s of speech; weights: {row['weights']}."
    )
