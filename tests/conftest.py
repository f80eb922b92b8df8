"""Fixtures every test may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.oracle import Oracle

pytest_plugins = ["tests.servers"]

# The demo's tensors are so small that a second thread only waits; set before anything loads torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests last; otherwise the order stays."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo checkpoint made for this session; OMNI_TEST_CHECKPOINT names another one."""
    given = os.environ.get("OMNI_TEST_CHECKPOINT")
    if given:
        return Path(given)
    out = tmp_path_factory.mktemp("checkpoint") / "demo"
    script = ROOT / "scripts" / "make_tiny_checkpoint.py"
    subprocess.run([sys.executable, str(script), "--out", str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Oracle:
    """transformers on the demo checkpoint, float32; its answers are cached for the session."""
    from tests.oracle import Oracle  # late: it loads torch and transformers

    return Oracle(checkpoint)
