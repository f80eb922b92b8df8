"""Throughput, real-time factor and time to first audio over concurrency, one line per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import NullFormatter, ScalarFormatter

from triton_omni.bench.report import Row
from triton_omni.errors import ConfigError

PANELS = {"req_s": "requests per second", "rtf": "mean real-time factor", "ttfp_ms": "mean time to first audio, ms"}


def lines(rows: Sequence[Row], figure: str) -> dict[str, list[tuple[int, float]]]:
    """(concurrency, value) in order, by configuration; of rows for the same point the last counts."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("concurrency") and row.get(figure) is not None:
            points.setdefault(f"{row['system']} {row['config']}".strip(), {})[row["concurrency"]] = row[figure]
    return {name: sorted(values.items()) for name, values in points.items()}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes a picture; its ending is its format. Raises: ConfigError when no row has a concurrency."""
    if not any(lines(rows, figure) for figure in PANELS):
        raise ConfigError("nothing to plot: no row has a concurrency")
    drawing, panels = pyplot.subplots(1, len(PANELS), figsize=(5 * len(PANELS), 4), layout="constrained")
    for panel, (figure, label) in zip(panels, PANELS.items(), strict=True):
        for name, points in lines(rows, figure).items():
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set(xlabel="concurrent requests", title=label, xscale="log", ylim=(0, None))
        panel.set_xticks(sorted({row["concurrency"] for row in rows if row.get("concurrency")}))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
