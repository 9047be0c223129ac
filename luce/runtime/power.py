"""The power limit of a GPU, on which its speed depends. Read only: by NVML, or by the amdgpu driver's files."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal


def power_limit(
    vendor: Literal["cuda", "hip"],
    address: str,
    *,
    devices: Path = Path("/sys/bus/pci/devices"),
    load: Callable[[str], Any] = ctypes.CDLL,
) -> int | None:
    """Watts that the GPU at a PCI address such as 0000:c1:00.0 may draw; None if nobody says."""
    return _nvml(address, load) if vendor == "cuda" else _amdgpu(devices / address.lower())


def _nvml(address: str, load: Callable[[str], Any]) -> int | None:
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return None
    device, milliwatts = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlInit_v2():
        return None
    try:
        if library.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(device)):
            return None
        if library.nvmlDeviceGetEnforcedPowerLimit(device, ctypes.byref(milliwatts)):
            return None
    finally:
        library.nvmlShutdown()
    return round(milliwatts.value / 1000)


def _amdgpu(device: Path) -> int | None:
    for file in sorted(device.glob("hwmon/hwmon*/power1_cap")):
        try:
            return round(int(file.read_text()) / 1_000_000)
        except (OSError, ValueError):
            continue
    return None
