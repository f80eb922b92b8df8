"""What this machine computes on: found without loading PyTorch, which takes longer than a server's whole start.

A platform counts only if the installed PyTorch can use it.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

Platform = Literal["cuda", "rocm", "xpu", "cpu"]
PLATFORMS: tuple[Platform, ...] = ("cuda", "rocm", "xpu", "cpu")
_TORCH_LIBRARIES: Mapping[Platform, str] = {
    "cuda": "libtorch_cuda.so",
    "rocm": "libtorch_hip.so",
    "xpu": "libtorch_xpu.so",
}
_VISIBLE: Mapping[Platform, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
TOOL_TIMEOUT_S = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """An accelerator. ``memory_bytes`` is None where the tool that lists it does not tell."""

    name: str
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """``devices`` in the order in which programs count them; none on "cpu"."""

    platform: Platform
    devices: tuple[Device, ...] = ()

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> Machine:
        """The first platform of cuda, rocm and xpu that has a device, else cpu."""
        for platform, find in _FINDERS.items():
            devices = _visible(platform, find(), environment)
            if not devices:
                continue
            if torch_supports(platform):
                return cls(platform, tuple(devices))
            logger.warning(
                "%d %s devices, but the installed PyTorch has no %s in it: not used", len(devices), platform, platform
            )
        return cls("cpu")

    def __str__(self) -> str:
        if not self.devices:
            return f"{self.platform}: no accelerator"
        return f"{self.platform}: " + ", ".join(
            f"{index} {device.name}" + (f" {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else "")
            for index, device in enumerate(self.devices)
        )


def torch_supports(platform: Platform) -> bool:
    """Whether the installed PyTorch was built for ``platform``; looked up among its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / _TORCH_LIBRARIES[platform]).exists()


def _visible(platform: Platform, devices: list[Device], environment: Mapping[str, str]) -> list[Device]:
    """Those that the environment lets programs see, in its order."""
    mask = next((environment[name] for name in _VISIBLE[platform] if name in environment), None)
    if mask is None:
        return devices
    visible = []
    for entry in filter(None, (part.strip() for part in mask.split(","))):
        if entry.startswith("-") or (entry.isdecimal() and int(entry) >= len(devices)) or not devices:
            break  # what follows an index that does not exist is not seen either
        # A name that is no number is a UUID, or that of a part of a device.
        visible.append(devices[int(entry)] if entry.isdecimal() else Device(f"device {entry}"))
    return visible


def _cuda_devices() -> list[Device]:
    rows = csv.reader(
        _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits").splitlines()
    )
    return [Device(row[0].strip(), _mebibytes(row[1])) for row in rows if len(row) == 2]


def _mebibytes(text: str) -> int | None:
    text = text.strip()
    return int(text) << 20 if text.isdecimal() else None


def _rocm_devices() -> list[Device]:
    """The kernel driver's nodes that have compute units; its other nodes are CPUs."""
    devices = []
    for node in sorted(_KFD_NODES.glob("*"), key=lambda path: int(path.name)):
        properties = dict(line.split(maxsplit=1) for line in _text(node / "properties").splitlines() if " " in line)
        if int(properties.get("simd_count", "0")):
            sizes = [
                int(line.split()[1])
                for bank in (node / "mem_banks").glob("*/properties")
                for line in _text(bank).splitlines()
                if line.startswith("size_in_bytes ")
            ]
            devices.append(Device(_text(node / "name").strip() or "AMD GPU", sum(sizes) or None))
    return devices


def _xpu_devices() -> list[Device]:
    lines = _output("xpu-smi", "discovery", "--dump", "2,16").splitlines()[1:]  # name and memory, under a heading
    rows = csv.reader(lines)
    return [Device(row[0].strip(), _mebibytes(row[1].split(".")[0])) for row in rows if len(row) == 2]


_FINDERS: Mapping[Platform, Callable[[], list[Device]]] = {
    "cuda": _cuda_devices,
    "rocm": _rocm_devices,
    "xpu": _xpu_devices,
}


def _output(*command: str) -> str:
    """What a tool prints; nothing when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s gives no answer: %s", command[0], error)
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
