"""``scripts/bench.py run`` and ``report``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from triton_omni.bench import report
from triton_omni.bench.figures import figures
from triton_omni.bench.fleet import Fleet
from triton_omni.bench.load import Target, arrivals, shares
from triton_omni.bench.record import Record
from triton_omni.bench.workload import APIS, Workload
from triton_omni.errors import ConfigError, InvalidRequestError, OmniError

KEY_VARIABLE = "OPENAI_API_KEY"
# Of a closed loop, unless told otherwise: each place is used ten times.
WAVES = 10
OPEN_LOOP_REQUESTS = 100
OPEN_LOOP_WARMUPS = 5
# What one client process reads without being the limit; docs/performance/frontend.md has the figures.
STREAMS_PER_PROCESS = 32
_FIXED = Workload()


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """``concurrency`` requests at a time, or ``request_rate`` a second; one of them is 0."""

    concurrency: int
    request_rate: float
    requests: int
    warmups: int


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    formatter = functools.partial(argparse.ArgumentDefaultsHelpFormatter, max_help_position=32, width=120)
    top = argparse.ArgumentParser(prog="bench.py", description="Load and measure a server that speaks.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", formatter_class=formatter, help="send requests, print and keep the figures")
    add = run.add_argument
    add("--url", required=True, help="the server's root, http://HOST:PORT; with --api grpc tritonserver's HOST:PORT")
    add("--api", choices=APIS, default="openai", help="openai: our frontend; vllm-omni: its server; grpc: omni_bls")
    add("--model", default="", help="what requests name as model (not with grpc)")
    load = run.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=_numbers(int), default=[1, 16, 32, 64], help="requests at a time, each level"
    )
    load.add_argument("--request-rate", type=_numbers(float), help="requests a second (Poisson), each level")
    add("--requests", type=_numbers(int), help=f"of each level, or one number for all; none: {WAVES} x concurrency")
    add("--warmups", type=int, help="requests before each level; none: one full wave of it")
    add("--text-tokens", type=int, default=_FIXED.text_tokens, help="exact length of each answer's text")
    add("--audio-frames", type=int, default=_FIXED.audio_frames, help="exact length of its speech, 80 ms a frame")
    add("--natural", action="store_true", help="answers as long as the model makes them, instead of the two above")
    add("--prompt-tokens", type=int, default=_FIXED.prompt_tokens, help="about so many, instructions included")
    add("--prompt-file", default="", help="prompts to use instead, one a line")
    add("--instructions", default=_FIXED.instructions, help="system message; empty: none")
    add("--modalities", type=_words, default=_FIXED.modalities, help="text, audio or text,audio")
    add("--extra-body", type=_object, default={}, help="JSON merged into every request; @FILE reads it")
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--processes", type=int, default=0, help=f"client processes; 0: one per {STREAMS_PER_PROCESS} streams")
    add("--timeout-s", type=float, default=600.0, help="longest that an answer may take")
    add("--system", default="", help="name in rows and plots; none: by --api")
    add("--config", default="", help="name of the server's configuration in rows and plots")
    add("--gpus", default="", help="that the server has; none: this machine's")
    add("--out", type=Path, help="append rows to this file, JSON lines")
    _shared(run)
    told = commands.add_parser("report", formatter_class=formatter, help="table and plots of kept rows")
    told.add_argument("rows", type=Path, nargs="+", help="files of --out")
    _shared(told)
    return top


def _shared(command: argparse.ArgumentParser) -> None:
    command.add_argument("--plot", type=Path, help="picture to write: .png, .svg or .pdf")


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        values = [kind(word) for word in text.split(",")]
        if not all(value > 0 for value in values):
            raise argparse.ArgumentTypeError(f"must be numbers above 0, separated by commas; got {text!r}")
        return values

    return parse


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object or @FILE: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def levels(options: argparse.Namespace) -> list[Level]:
    """Raises: InvalidRequestError when the numbers of requests do not fit the levels."""
    loads = (
        [(c, 0.0) for c in options.concurrency] if not options.request_rate else [(0, r) for r in options.request_rate]
    )
    counts = options.requests or [c * WAVES or OPEN_LOOP_REQUESTS for c, _ in loads]
    if len(counts) == 1:
        counts = counts * len(loads)
    if len(counts) != len(loads):
        raise InvalidRequestError("requests", f"must be one number or {len(loads)}, one per level; got {len(counts)}")
    warmups = options.warmups
    return [
        Level(c, rate, n, (c or OPEN_LOOP_WARMUPS) if warmups is None else warmups)
        for (c, rate), n in zip(loads, counts, strict=True)
    ]


def workload(options: argparse.Namespace) -> Workload:
    names = {field.name for field in dataclasses.fields(Workload)} - {"extra"}
    chosen = {name: getattr(options, name) for name in names}
    if options.natural:
        chosen |= {"text_tokens": None, "audio_frames": None}
    return Workload(**chosen, extra=options.extra_body)


def make_target(api: str, url: str, key: str, timeout_s: float, modalities: Sequence[str]) -> Target:
    """Runs in a client process: only what it speaks is loaded there."""
    wants = {"wants_text": "text" in modalities, "wants_audio": "audio" in modalities}
    if api == "grpc":
        from triton_omni.bench.grpc_target import GrpcTarget

        return GrpcTarget(url, timeout_s=timeout_s, **wants)
    from triton_omni.bench.http_target import HttpTarget

    return HttpTarget(url, api_key=key, timeout_s=timeout_s, **wants)


def measure(options: argparse.Namespace, command: str, tell: Callable[[report.Row], None]) -> list[report.Row]:
    """All levels, one after the other; ``tell`` gets each row as soon as it is there."""
    plan, work = levels(options), workload(options)
    if options.api != "grpc" and not options.model:
        raise InvalidRequestError("model", "is missing: name the model that the server has")
    streams = max(level.concurrency for level in plan) or STREAMS_PER_PROCESS
    processes = options.processes or max(1, streams // STREAMS_PER_PROCESS)
    key = os.environ.get(KEY_VARIABLE, "")
    target = functools.partial(make_target, options.api, options.url, key, options.timeout_s, options.modalities)
    about = {
        "system": options.system or ("vllm-omni" if options.api == "vllm-omni" else "triton-omni"),
        "config": options.config or ("grpc" if options.api == "grpc" else ""),
        "gpus": options.gpus or report.gpus(),
        "commit": report.commit(),
        "command": command,
    }
    rows = []
    with Fleet(target, processes) as fleet:
        for level in plan:
            if level.warmups:
                warm = dataclasses.replace(level, requests=level.warmups)
                _level(fleet, processes, warm, work, options, "warming up")
            records, client_cpu = _level(fleet, processes, level, work, options, "measuring")
            load = {"concurrency": level.concurrency, "request_rate": level.request_rate or None}
            row = {**about, **load, **figures(records), "processes": processes, "client_cpu": client_cpu}
            rows.append(row)
            tell(row)
    return rows


def _level(
    fleet: Fleet, processes: int, level: Level, work: Workload, options: argparse.Namespace, doing: str
) -> tuple[list[Record], float]:
    bodies = [work.body(options.api, options.model, prompt) for prompt in work.prompts(level.requests)]
    due_s = arrivals(level.request_rate, level.requests, options.seed) if level.request_rate else ()
    records: list[Record] = []
    name = f"{doing} {f'c={level.concurrency}' if level.concurrency else f'{level.request_rate:g}/s'}"
    with tqdm(total=level.requests, desc=name, unit="req", disable=None) as bar:

        def done(record: Record) -> None:
            records.append(record)
            bar.update()

        cpu = fleet.run(shares(bodies, processes, level.concurrency or processes, due_s), done)
    return records, cpu


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: could not be done; 2: done, and requests failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    command = shlex.join(["scripts/bench.py", *given])

    def tell(row: report.Row) -> None:
        if options.out is not None:
            report.append(options.out, row)

    try:
        rows = report.read(options.rows) if options.command == "report" else measure(options, command, tell)
        sys.stdout.write(report.table(rows) + "\n")
        if options.plot is not None:
            _plot(rows, options.plot)
    except OmniError as error:
        field = f"--{error.field.replace('_', '-')}: " if error.field else ""
        sys.stderr.write(f"bench.py: {field}{error.message}\n")
        return 1
    return 2 if any(row["failed"] for row in rows) and options.command == "run" else 0


def _plot(rows: Sequence[report.Row], path: Path) -> None:
    try:
        from triton_omni.bench import plots
    except ImportError as missing:
        raise ConfigError(
            f"plots need a package that is missing here ({missing.name}): pip install -e '.[bench]'"
        ) from None
    plots.plot(rows, path)
