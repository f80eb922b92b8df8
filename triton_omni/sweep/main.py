"""The command line of scripts/sweep.sh."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from triton_omni.bench import command_line, report
from triton_omni.bench.report import Row
from triton_omni.bench.workload import Workload
from triton_omni.errors import ConfigError, OmniError
from triton_omni.serve.machine import Machine
from triton_omni.serve.profile import default_name
from triton_omni.sweep import long_form, outputs
from triton_omni.sweep.budget import FULL_WAVES, Budget
from triton_omni.sweep.rows import OTHER, PROFILE, ROWS, ModelSettings, known, of_profile, settings
from triton_omni.sweep.stack import Stack

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
MAX_LOAD_S = 1800.0  # of all models at the start; a cold thinker compiles for minutes
MAX_ANSWER_S = 3600.0
_LENGTHS = ("text_tokens", "audio_frames", "prompt_tokens")
_DESCRIPTION = f"""\
Measure the ablation: {", ".join(ROWS)}; each row adds one optimisation to those before it. {PROFILE} is
the profile itself. A call measures the points (row x level) that fit into its budget and appends them to the results;
--resume goes on where an earlier call stopped. The thinker is loaded again only where its own settings change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A row at a concurrency."""

    row: str
    level: int


def parser() -> argparse.ArgumentParser:
    formatter = functools.partial(argparse.ArgumentDefaultsHelpFormatter, max_help_position=30, width=120)
    top = argparse.ArgumentParser(prog="sweep.sh", description=_DESCRIPTION, formatter_class=formatter)
    add = top.add_argument
    add(
        "--rows",
        type=_words,
        default=list(ROWS),
        help=f"some of {', '.join((OTHER, *ROWS, PROFILE))}; measured in this order",
    )
    add("--levels", type=_levels, default=[1, 16, 32, 64], help="requests at a time")
    add("--budget-s", type=float, help=f"for the whole call; none: {FULL_WAVES} requests in every place of each point")
    add("--resume", action="store_true", help="leave out the points that --results has for these GPUs")
    add(
        "--long-form", action="store_true", help="one request at a time with a long prompt and a long answer, only that"
    )
    add("--checkpoint", type=Path, help="none: the demo checkpoint")
    add("--random-weights", action="store_true", help="of the checkpoint's shapes; the directory needs no tensors")
    add("--profile", help="deploy profile below all rows; none: by what is there")
    add("--set", action="append", default=[], metavar="STAGE.KEY=VALUE", help="over the profile and over the rows")
    add(
        "--variant",
        type=_variant,
        action="append",
        default=[],
        metavar="NAME:STAGE.KEY=VALUE,...",
        help="a row of your own: the profile with these settings",
    )
    add("--api", choices=("openai", "grpc"), default="openai", help="grpc: omni_bls itself, without the frontend")
    add("--frontend-workers", type=int, default=2, help="processes of the frontend")
    for name, told in (
        ("text_tokens", "exact length of each answer's text"),
        ("audio_frames", "exact length of its speech, 80 ms a frame"),
        ("prompt_tokens", "about so many, instructions included"),
    ):
        usual = f"none: {getattr(Workload(), name)}, with --long-form {getattr(long_form.WORKLOAD, name)}"
        add(f"--{name.replace('_', '-')}", type=int, help=f"{told}; {usual}")
    add("--vllm-omni-url", help=f"the server that the row {OTHER} measures")
    add("--vllm-omni-model", default="qwen3-omni", help="its model")
    add("--results", type=Path, nargs="+", default=[ROOT / ".cache" / "sweep.jsonl"], help="appended to the first")
    add("--out", type=Path, default=ROOT / "docs" / "performance", help="where sweep.json, .md and .png go")
    add("--logs", type=Path, help="where the servers' logs go; none: a temporary directory")
    add("--report", action="store_true", help="measure nothing, write --out from --results")
    return top


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _variant(text: str) -> tuple[str, list[str]]:
    name, colon, settings = text.partition(":")
    if not (name and colon):
        raise argparse.ArgumentTypeError(f"must be NAME:STAGE.KEY=VALUE,..., got {text!r}")
    if name in (OTHER, *ROWS, PROFILE):
        raise argparse.ArgumentTypeError(f"must have a name that is no row's, got {name!r}")
    return name, [word for word in re.split(r",(?=\w+\.)", settings) if word]


def _levels(text: str) -> list[int]:
    try:
        levels = [int(word) for word in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers above 0, separated by commas; got {text!r}")
    return sorted(set(levels))


class Sweep:
    """One call: what is asked, what there is, and the time that is left."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self._command = command
        self._machine = Machine.detect()
        self._gpus = report.gpus()
        self._budget = Budget(options.budget_s)
        chosen = {name: value for name in _LENGTHS if (value := getattr(options, name)) is not None}
        self._work = dataclasses.replace(long_form.WORKLOAD if options.long_form else Workload(), **chosen)
        self._thinker_load_s = 0.0
        self._checkpoint: Path = options.checkpoint or ROOT / "checkpoints" / "demo"
        self._given = list(options.set)
        if options.random_weights:
            self._given += [f"{stage}.weights=random" for stage in ("thinker", "talker", "code2wav")]
        self._profile = options.profile or default_name(self._machine)
        self._variants: dict[str, list[str]] = dict(options.variant)

    def run(self, directory: Path) -> list[Point]:
        """Measures; returns the points for which the time did not suffice. Raises OmniError."""
        todo = self._points()
        undone: list[Point] = []
        if mine := [point for point in todo if point.row == OTHER]:
            undone += self._measure_other(mine, todo)
        todo = [point for point in todo if point.row != OTHER]
        if not todo:
            return undone
        every = {row: self._settings(row) for row in dict.fromkeys(point.row for point in todo)}
        with self._stack(directory) as stack:
            for row, wanted in every.items():
                mine = [point for point in todo if point.row == row]
                reloads = "thinker" in stack.changed(wanted)
                if reloads and self._thinker_load_s > self._budget.left_s():
                    undone += mine
                    continue
                began_s = time.monotonic()
                stack.apply(wanted, min(MAX_LOAD_S, self._budget.left_s()))
                if reloads:
                    self._thinker_load_s = time.monotonic() - began_s
                for point in mine:
                    left = len(todo) - todo.index(point)
                    if not self._point(point, stack.url, self.options.api, self._checkpoint.resolve().name, left):
                        undone.append(point)
        return undone

    def _settings(self, row: str) -> dict[str, ModelSettings]:
        if row in self._variants:
            return of_profile(self._profile, [*self._variants[row], *self._given], self._machine)
        return settings(row, self._profile, self._given, self._machine)

    def measure_long_form(self, directory: Path) -> None:
        """One row more for the results, of the default and at one request at a time. Raises OmniError."""
        given = [*self._given, *long_form.SETTINGS]
        wanted = settings(PROFILE, self._profile, given, self._machine)
        with self._stack(directory) as stack:
            stack.apply(wanted, min(MAX_LOAD_S, self._budget.left_s()))
            model = self._checkpoint.resolve().name
            timeout_s = min(MAX_ANSWER_S, self._budget.left_s())
            row = long_form.measure(self._work, stack.url, self.options.api, model, timeout_s)
        if row["failed"]:
            raise ConfigError(f"the long request failed: {row['errors']}")
        self._keep(row | {"system": "triton-omni", "config": outputs.LONG_FORM, "concurrency": 1})

    def _stack(self, directory: Path) -> Stack:
        workers = self.options.frontend_workers if self.options.api == "openai" else 0
        return Stack(self._checkpoint, directory, workers)

    def _points(self) -> list[Point]:
        done = set()
        if self.options.resume:
            rows = report.read([path for path in self.options.results if path.exists()])
            done = {(row["config"], row["concurrency"]) for row in rows if row["gpus"] == self._gpus}
        rows_asked = known([*self.options.rows, *self._variants], [*self._variants])
        every = [Point(row, level) for row in rows_asked for level in self.options.levels]
        return [point for point in every if (point.row, point.level) not in done]

    def _measure_other(self, points: Sequence[Point], todo: Sequence[Point]) -> list[Point]:
        url = self.options.vllm_omni_url
        if url is None:
            raise ConfigError(
                f"is missing: the row {OTHER} measures a server that runs already", field="--vllm-omni-url"
            )
        model, left = self.options.vllm_omni_model, len(todo)
        return [p for at, p in enumerate(points) if not self._point(p, url, "vllm-omni", model, left - at)]

    def _point(self, point: Point, url: str, api: str, model: str, points_left: int) -> bool:
        """Warms up with one wave, which also tells how many requests there is time for; False when for too few."""
        expected_s = self._budget.expected_wave_s(point.row, point.level)
        if 3 * expected_s > self._budget.left_s():
            logger.info("%s at %d: no time left (%.0f s a wave)", point.row, point.level, expected_s)
            return False
        warm = self._level(point, url, api, model, point.level)
        if not warm["completed"]:
            raise ConfigError(f"{point.row} at {point.level}: every request failed: {warm['errors']}")
        self._budget.took(point.row, point.level, warm["wall_s"])
        requests = self._budget.requests(point.level, warm["wall_s"], points_left)
        if not requests:
            logger.info("%s at %d: no time left (%.0f s a wave)", point.row, point.level, warm["wall_s"])
            return False
        self._keep(self._level(point, url, api, model, requests) | {"requests": requests})
        return True

    def _level(self, point: Point, url: str, api: str, model: str, requests: int) -> Row:
        words = ["run", "--url", url, "--api", api, "--model", model, "--concurrency", str(point.level)]
        words += ["--requests", str(requests), "--warmups", "0", "--config", point.row]
        for name in _LENGTHS:
            words += [f"--{name.replace('_', '-')}", str(getattr(self._work, name))]
        words += ["--timeout-s", str(max(1.0, min(MAX_ANSWER_S, self._budget.left_s())))]
        [row] = command_line.measure(command_line.parser().parse_args(words), self._command, lambda row: None)
        return row

    def _keep(self, row: Row) -> None:
        row |= {
            "gpus": self._gpus,
            "commit": report.commit(),
            "command": self._command,
            "weights": "random" if self.options.random_weights else self._checkpoint.resolve().name,
        }
        report.append(self.options.results[0], row)
        logger.info("kept: %s", {key: row.get(key) for key in ("config", "concurrency", "completed", "req_s", "rtf")})


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: could not be done; 3: done as far as the budget went."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    code = 0
    try:
        undone = [] if options.report else _measure(options, shlex.join(["scripts/sweep.sh", *given]))
        code = 3 if undone else 0
        for point in undone:
            sys.stderr.write(f"not measured for want of time: {point.row} at {point.level}\n")
    except OmniError as error:
        code = _tell(error)
    try:  # what was measured before something went wrong is there all the same
        if rows := report.read([path for path in options.results if path.exists()]):
            outputs.write(rows, options.out)
    except OmniError as error:
        code = code or _tell(error)
    return code


def _tell(error: OmniError) -> int:
    sys.stderr.write(f"sweep.sh: {error.field + ': ' if error.field else ''}{error.message}\n")
    return 1


def _measure(options: argparse.Namespace, command: str) -> list[Point]:
    """Returns the points for which the time did not suffice."""
    with contextlib.ExitStack() as scope:
        directory = options.logs or Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="sweep_")))
        sweep = Sweep(options, command)
        if not options.long_form:
            return sweep.run(directory)
        sweep.measure_long_form(directory)
        return []


if __name__ == "__main__":
    sys.exit(main())
