"""Which Python runs the models, and what nvidia-pytriton's server asks of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve.installation import Installation, Interpreter

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """A package with a stub for this Python."""
    package = tmp_path / "tritonserver"
    stub = package / "python_backend_stubs" / VERSION / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.touch()
    return Installation(package / "bin" / "tritonserver", package)


def test_an_interpreter_tells_of_itself() -> None:
    python = Interpreter.current()
    assert python.bin == Path(sys.executable).parent
    assert (python.version, python.numpy) == (VERSION, np.__version__)
    assert Path(python.library_directory).is_dir()


def test_the_stub_lies_beside_the_backend(installation: Installation, tmp_path: Path) -> None:
    (argument,) = installation.backend_directory(tmp_path / "backends", Interpreter.current())
    assert argument == f"--backend-directory={tmp_path / 'backends'}"
    assert (tmp_path / "backends" / "python" / "triton_python_backend_stub").exists()


@pytest.mark.parametrize(("changes", "told"), [({"numpy": "2.3.5"}, "numpy<2"), ({"version": "3.99"}, "Python 3.99")])
def test_a_python_that_the_package_cannot_serve_is_refused(
    installation: Installation, tmp_path: Path, changes: dict[str, str], told: str
) -> None:
    python = dataclasses.replace(Interpreter.current(), **changes)
    with pytest.raises(ConfigError, match=told):
        installation.backend_directory(tmp_path / "backends", python)


def test_a_server_that_brings_its_backend_takes_any_numpy(tmp_path: Path) -> None:
    python = dataclasses.replace(Interpreter.current(), numpy="2.3.5")
    assert Installation(tmp_path / "tritonserver").backend_directory(tmp_path / "backends", python) == []
