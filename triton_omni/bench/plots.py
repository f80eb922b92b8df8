"""Throughput, real-time factor and time to first audio over concurrency, one line per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import colormaps, pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from triton_omni.bench.report import Row
from triton_omni.errors import ConfigError

PANELS = {"req_s": "requests per second", "rtf": "mean real-time factor", "ttfp_ms": "mean time to first audio, ms"}

WIDE = 30.0  # largest by smallest time from which an axis is logarithmic
_COLORS = colormaps["tab20"]


def lines(rows: Sequence[Row], figure: str) -> dict[str, list[tuple[int, float]]]:
    """(concurrency, value) in order, by configuration; of rows for the same point the last counts."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("concurrency") and row.get(figure) is not None:
            points.setdefault(f"{row['system']} {row['config']}".strip(), {})[row["concurrency"]] = row[figure]
    return {name: sorted(values.items()) for name, values in points.items()}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes a picture; its ending is its format. A row of panels for each machine, by the rows' ``gpus``. Raises:
    ConfigError when no row has a concurrency.
    """
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machines.setdefault(str(row.get("gpus", "")), []).append(row)
    machines = {name: mine for name, mine in machines.items() if any(lines(mine, figure) for figure in PANELS)}
    if not machines:
        raise ConfigError("nothing to plot: no row has a concurrency")
    size = (5 * len(PANELS) + 2, 4 * len(machines))
    drawing, grid = pyplot.subplots(len(machines), len(PANELS), figsize=size, layout="constrained", squeeze=False)
    for panels, (name, mine) in zip(grid, machines.items(), strict=True):
        for panel, figure in zip(panels, PANELS, strict=True):
            _draw(panel, mine, figure)
        panels[0].set_ylabel(name.replace("none", "CPU"))
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def _draw(panel: Axes, rows: Sequence[Row], figure: str) -> None:
    every = lines(rows, figure)
    for index, (name, points) in enumerate(every.items()):
        panel.plot(*zip(*points, strict=True), marker="o", label=name, color=_COLORS(index % _COLORS.N))
    panel.set(xlabel="concurrent requests", title=PANELS[figure], xscale="log")
    values = [value for points in every.values() for _, value in points if value > 0]
    if figure != "req_s" and values and max(values) > WIDE * min(values):
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(ScalarFormatter())
    else:
        panel.set_ylim(0, None)
    panel.set_xticks(sorted({row["concurrency"] for row in rows if row.get("concurrency")}))
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.3)
