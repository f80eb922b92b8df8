"""Every request that runs finds a place in code2wav: its session lives on when the talker has given its slot away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.test_profile import machine, rendered, values
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.serve.profile import names


@pytest.mark.parametrize("name", names())
def test_code2wav_has_a_slot_for_each_request_that_runs(name: str, tmp_path: Path) -> None:
    """In each replica: nothing keeps their shares equal."""
    configs = rendered(name, machine(3), tmp_path)
    requests = int(values(configs["omni_bls"]).get("max_requests", PipelineConfig().max_requests))
    instances = sum(group.count for group in configs["omni_bls"].instance_group)
    slots = int(values(configs["code2wav"]).get("max_sessions", Code2WavConfig().max_sessions))
    assert instances * requests <= slots
