"""What a machine has, by its own tools: scripts stand in for those that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_omni.serve import machine
from triton_omni.serve.machine import Device, Machine

H200 = Device("NVIDIA H200", 143771 << 20)


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(machine, "_KFD_NODES", tmp_path / "kfd")
    monkeypatch.setattr(machine, "torch_supports", lambda platform: True)


def tool(folder: Path, name: str, output: str, code: int = 0) -> None:
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    script.chmod(0o755)


def test_a_machine_without_accelerators() -> None:
    assert Machine.detect({}) == Machine("cpu")
    assert str(Machine.detect({})) == "cpu: no accelerator"


def test_nvidia_gpus_with_their_memory(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", "NVIDIA H200, 143771\nNVIDIA H200, 143771\nOdd, [N/A]")
    found = Machine.detect({})
    assert found == Machine("cuda", (H200, H200, Device("Odd")))
    assert str(found) == "cuda: 0 NVIDIA H200 140 GiB, 1 NVIDIA H200 140 GiB, 2 Odd"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("1", ["B"]),
        ("1,0", ["B", "A"]),
        ("0,5,1", ["A"]),
        ("0,-1,1", ["A"]),
        ("GPU-8f", ["device GPU-8f"]),
        ("", []),
    ],
)
def test_only_visible_gpus_count(tmp_path: Path, mask: str, expected: list[str]) -> None:
    tool(tmp_path, "nvidia-smi", "A, 1\nB, 1")
    found = Machine.detect({"CUDA_VISIBLE_DEVICES": mask})
    assert [device.name for device in found.devices] == expected
    assert found.platform == ("cuda" if expected else "cpu")


def test_gpus_without_a_fitting_pytorch_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tool(tmp_path, "nvidia-smi", "A, 1")
    monkeypatch.setattr(machine, "torch_supports", lambda platform: False)
    assert Machine.detect({}) == Machine("cpu")
    assert "1 cuda devices, but the installed PyTorch has no cuda in it" in caplog.text


def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", "NVIDIA-SMI has failed, because, of the driver", code=9)
    assert Machine.detect({}) == Machine("cpu")


def test_amd_gpus_are_the_nodes_with_compute_units(tmp_path: Path) -> None:
    for number, simds in ((0, 0), (1, 304), (10, 304)):
        bank = tmp_path / "kfd" / str(number) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {number << 30}\n")
        (bank.parents[1] / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\n")
        (bank.parents[1] / "name").write_text("gfx942\n")
    assert Machine.detect({}) == Machine("rocm", (Device("gfx942", 1 << 30), Device("gfx942", 10 << 30)))
    assert Machine.detect({"HIP_VISIBLE_DEVICES": "1"}).devices == (Device("gfx942", 10 << 30),)


def test_intel_gpus(tmp_path: Path) -> None:
    tool(tmp_path, "xpu-smi", 'Device Name,Memory Physical Size\n"Intel Data Center GPU Max 1550","131072.00"')
    assert Machine.detect({}) == Machine("xpu", (Device("Intel Data Center GPU Max 1550", 128 << 30),))
