"""``tritonserver`` itself, found and given its environment: ``python -m triton_omni.serve.bare_tritonserver OPTIONS``.

This process becomes the tritonserver; all options are its own. Without ``--model-repository`` it gets this project's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from triton_omni.errors import ConfigError
from triton_omni.serve.installation import Installation
from triton_omni.serve.tritonserver import BACKEND_CONFIG

ROOT = Path(__file__).resolve().parents[2]


def command(installation: Installation, options: Sequence[str], backends: Path) -> list[str]:
    """The command line. ``backends``: where the Python backend is put together, once. Options given win."""
    words = [str(installation.binary)]
    if installation.package is not None and not _given(options, "--backend-directory"):
        words += [f"--backend-directory={backends}"] if backends.exists() else installation.backend_directory(backends)
    if not _given(options, "--model-repository", "--model-store"):
        words.append(f"--model-repository={ROOT / 'model_repository'}")
    for key, value in BACKEND_CONFIG.items():
        if not any(f"python,{key}=" in option for option in options):
            words.append(f"--backend-config=python,{key}={value}")
    return [*words, *options]


def _given(options: Sequence[str], *names: str) -> bool:
    return any(option.partition("=")[0] in names for option in options)


def main() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        installation = Installation.find()
        words = command(installation, sys.argv[1:], ROOT / ".cache" / f"backends-{version}")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    os.execve(words[0], words, installation.environment(os.environ))


if __name__ == "__main__":
    main()
