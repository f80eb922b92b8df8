"""What a tritonserver's log says of its models and of what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

ERROR_LINES = 40
_LOADING = re.compile(r"] \"?loading: (?P<model>[^:\"\s]+)")
_LOADED = re.compile(r"successfully loaded '(?P<model>[^']+)'")
_INITIALIZED = re.compile(r"triton_omni\S*: (?P<instance>\S+) is initialized")
_UNHEALTHY = re.compile(r"Stub process '[^']+' is not healthy|Failed to obtain the health mutex")
_FAILED = re.compile(r"failed to load '(?P<model>[^']+)'")


def steps(log: str) -> Iterator[tuple[str, str]]:
    """(model, "loading"), then (model, "loaded"), as often as the log says them."""
    for step, pattern in (("loading", _LOADING), ("loaded", _LOADED)):
        for match in pattern.finditer(log):
            yield match["model"], step


def failed_model(log: str) -> str | None:
    """The first that did not load."""
    failed = _FAILED.search(log)
    return failed["model"] if failed else None


def initialized(log: str) -> set[str]:
    """The instances whose own process says so (triton.parameters.initializer)."""
    return {match["instance"] for match in _INITIALIZED.finditer(log)}


def loaded(log: str) -> set[str]:
    """The models that tritonserver says are."""
    return {match["model"] for match in _LOADED.finditer(log)}


def unhealthy(log: str) -> str | None:
    """tritonserver's words for a model's process that it believes to be stuck."""
    found = _UNHEALTHY.search(log)
    return found.group() if found else None


def error_lines(log: str) -> list[str]:
    """The last error lines with the tracebacks that follow them."""
    lines: list[str] = []
    wanted = False
    for line in log.splitlines():
        if re.match(r"[IWEF]\d{4} ", line):
            wanted = line[0] in "EF"
        elif line.startswith(("+--", "|")) or not line.strip():
            continue
        elif "Error" in line:  # a traceback's last line
            wanted = True
        if wanted:
            lines.append(line)
    return lines[-ERROR_LINES:]
