"""Starts the image's entry point as a container would."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    code: int
    stdout: str
    stderr: str


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's without what is the container's own, and ``variables``."""
    return {name: text for name, text in os.environ.items() if not name.startswith("OMNI_")} | variables


def run(program: Path, *arguments: str, **variables: str) -> Finished:
    """Into files, not pipes: whoever passes the logs on has the output open until the process's end was noticed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([program, *arguments], env=environment(variables), cwd="/", stdout=out, stderr=err)
        code = process.wait(120)
        out.seek(0)
        err.seek(0)
        return Finished(code, out.read(), err.read())
