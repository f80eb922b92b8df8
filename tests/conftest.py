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

ROOT = Path(__file__).resolve().parent.parent
DEMO_CHECKPOINT = ROOT / "checkpoints" / "demo"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The demo checkpoint, written once; OMNI_TEST_CHECKPOINT names another one."""
    given = os.environ.get("OMNI_TEST_CHECKPOINT")
    if given:
        return Path(given)
    if not (DEMO_CHECKPOINT / "config.json").exists():
        script = ROOT / "scripts" / "make_tiny_checkpoint.py"
        subprocess.run([sys.executable, str(script), "--out", str(DEMO_CHECKPOINT)], check=True)
    return DEMO_CHECKPOINT


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Oracle:
    """transformers on the demo checkpoint, float32; its answers are cached for the session."""
    from tests.oracle import Oracle  # late: it loads torch and transformers

    return Oracle(checkpoint)
