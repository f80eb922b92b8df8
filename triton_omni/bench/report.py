"""Rows of figures: as JSON lines, as a table, and with where they came from."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_omni.bench.figures import DEFINITIONS
from triton_omni.errors import ConfigError

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
_DIGITS = 5


def _number(row: Mapping[str, Any], key: str, form: str = ".0f", scale: float = 1.0) -> str:
    value = row.get(key)
    return "-" if value is None else format(value * scale, form)


def _spread(row: Mapping[str, Any], name: str, unit: str, form: str = ".0f", scale: float = 1.0) -> str:
    return "/".join(
        _number(row, key + unit, form, scale) for key in (name, f"{name}_p50", f"{name}_p95", f"{name}_p99")
    )


def _load(row: Mapping[str, Any]) -> str:
    return f"c={row['concurrency']}" if row.get("concurrency") else f"{row['request_rate']:g}/s"


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "system": lambda row: f"{row['system']} {row['config']}".strip(),
    "load": _load,
    "done": lambda row: str(row["completed"]),
    "failed": lambda row: str(row["failed"]),
    "req/s": lambda row: _number(row, "req_s", ".2f"),
    "audio s/s": lambda row: _number(row, "audio_s_per_s", ".1f"),
    "TTFT ms": lambda row: _spread(row, "ttft", "_ms"),
    "TTFP ms": lambda row: _spread(row, "ttfp", "_ms"),
    "E2E s": lambda row: _spread(row, "e2e", "_ms", ".2f", 1e-3),
    "RTF": lambda row: _spread(row, "rtf", "", ".3f"),
    "gap ms": lambda row: _spread(row, "gap", "_ms"),
    "stalls": lambda row: f"{row['underruns']} ({_number(row, 'stalled_s', '.2f')} s)",
    "underrun ms": lambda row: f"{_number(row, 'underrun_p99_ms')} ({row['audible_underruns']} audible)",
    "client": lambda row: _number(row, "client_cpu", ".0%"),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Four figures in one cell are mean/p50/p95/p99; ``underrun`` is its p99."""
    cells = [list(_COLUMNS), *([write(row) for write in _COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    problems = [f"{_load(row)}: {count} x {error}" for row in rows for error, count in row.get("errors", {}).items()]
    limited = [
        f"{_load(row)}: the client was busy; give it more --processes" for row in rows if row.get("client_cpu", 0) > 0.8
    ]
    return "\n".join([*lines, "", "Four figures: mean/p50/p95/p99.", DEFINITIONS, *problems, *limited])


def rounded(row: Mapping[str, Any]) -> Row:
    return {key: round(value, _DIGITS) if isinstance(value, float) else value for key, value in row.items()}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """One more line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded(row)) + "\n")


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of JSON-lines files. Raises: ConfigError naming what is no row."""
    rows = []
    for path in paths:
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_row(line, f"{path}:{number}"))
    return rows


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON: {error}") from None
    missing = {"system", "config", "completed", "failed"} - set(row if isinstance(row, dict) else ())
    if missing:
        raise ConfigError(f"{place} is no row of this benchmark: it lacks {', '.join(sorted(missing))}")
    return dict(row)


def commit() -> str:
    """Of this checkout, ``-dirty`` when files differ from it; empty where there is no git."""
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*").strip()


def gpus() -> str:
    """This machine's, as "2 x NVIDIA H200"; "none" without."""
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _output(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return ""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""
