"""Where a tritonserver is, and what it needs to run Python models."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from triton_omni.errors import ConfigError

_ASK = """
import importlib.metadata, sys, sysconfig
print("%d.%d" % sys.version_info[:2])
print(next((each.version for each in importlib.metadata.distributions(name="numpy")), ""))
print(sysconfig.get_config_var("LIBDIR"))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python the models run under. ``bin``: the directory of its python3; ``version``: "3.11"; ``numpy``: the
    version of its NumPy, empty when it has none.
    """

    bin: Path
    version: str
    numpy: str
    library_directory: str

    @classmethod
    def current(cls) -> Interpreter:
        """The one that runs this."""
        return cls.of(Path(sys.executable))

    @classmethod
    def of(cls, executable: Path) -> Interpreter:
        """Asks ``executable``; a virtual environment's counts with its packages."""
        answer = subprocess.run([executable, "-c", _ASK], check=True, capture_output=True, text=True).stdout
        return cls(executable.parent, *answer.splitlines())


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver. ``package``: nvidia-pytriton's tritonserver directory when it is that one, else None."""

    binary: Path
    package: Path | None = None

    @classmethod
    def find(cls) -> Installation:
        """The tritonserver on PATH, else nvidia-pytriton's. Raises ConfigError when there is neither."""
        on_path = shutil.which("tritonserver")
        if on_path:
            return cls(Path(on_path))
        spec = importlib.util.find_spec("pytriton")
        if spec is None or spec.origin is None:
            raise ConfigError("no tritonserver on PATH and the package nvidia-pytriton is not installed")
        package = Path(spec.origin).parent / "tritonserver"
        return cls(package / "bin" / "tritonserver", package)

    def backend_directory(self, target: Path, python: Interpreter | None = None) -> list[str]:
        """Server arguments for the Python backend; nvidia-pytriton's needs the stub of the right Python beside it."""
        if self.package is None:
            return []
        python = python or Interpreter.current()
        stub = self.package / "python_backend_stubs" / python.version / "triton_python_backend_stub"
        if not stub.exists():
            raise ConfigError(f"nvidia-pytriton has no stub for Python {python.version} ({stub})")
        if python.numpy and int(python.numpy.partition(".")[0]) >= 2:
            # Its stubs would hand over arrays of no bytes.
            raise ConfigError(
                f"nvidia-pytriton's Python backend cannot pass arrays of NumPy {python.numpy}: "
                f"{python.bin / 'python3'} -m pip install 'numpy<2'"
            )
        backend = target / "python"
        backend.mkdir(parents=True)
        for source in (*(self.package / "backends" / "python").glob("*.*"), stub):
            (backend / source.name).symlink_to(source)
        return [f"--backend-directory={target}"]

    def environment(self, base: Mapping[str, str], python: Interpreter | None = None) -> dict[str, str]:
        """The stub's Python ignores PYTHONPATH and takes its packages from the first python3 on PATH."""
        python = python or Interpreter.current()
        env = dict(base)
        env["PATH"] = os.pathsep.join([str(python.bin), env.get("PATH", os.defpath)])
        if self.package is not None:
            # A stub that finds the system's libpython of another patch release cannot import ssl.
            libraries = [python.library_directory, str(self.package.parents[1] / "nvidia_pytriton.libs")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *filter(None, [env.get("LD_LIBRARY_PATH")])])
        return env
