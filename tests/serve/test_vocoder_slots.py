"""Every request that runs finds a place in code2wav: its session lives on when the talker has given its slot away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.test_profile import machine, rendered
from triton_omni.serve.profile import names

WARNING = "code2wav.max_sessions"


@pytest.mark.parametrize("name", names())
def test_a_shipped_profile_has_a_place_for_each_request_that_runs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rendered(name, machine(3), tmp_path)
    assert WARNING not in caplog.text


def test_too_few_places_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rendered("cpu-demo", machine(0), tmp_path / "few", "code2wav.max_sessions=127")
    assert f"{WARNING} is 127, and omni_bls runs up to 128 requests" in caplog.text
    caplog.clear()
    rendered("cpu-demo", machine(0), tmp_path / "more", "omni_bls.replicas=5")
    assert f"{WARNING} is 256, and omni_bls runs up to 320 requests" in caplog.text
    caplog.clear()
    rendered("cpu-demo", machine(0), tmp_path / "null", "code2wav.max_sessions=1", "code2wav.engine=null")
    assert WARNING not in caplog.text
