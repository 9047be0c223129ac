"""Device names to devices, and what there is to name."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import cast

from luce.errors import DeviceError, UsageError
from luce.runtime import driver
from luce.runtime.device import Device, DeviceKind, DeviceName
from luce.runtime.driver import Properties, Vendor
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice

VENDORS: tuple[Vendor, ...] = ("cuda", "hip")
_NAME = re.compile(r"(cuda|hip|cpu):(0|[1-9][0-9]{0,2})", re.ASCII)


@dataclass(frozen=True)
class Found:
    """A GPU that a driver names; it may still lack CuPy or a compiler."""

    name: DeviceName
    properties: Properties


def parse(text: str) -> DeviceName:
    """`cuda:0`, `hip:1`, `cpu:0`. Raises UsageError naming --target-devices and the value."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--target-devices: expected auto, cuda:N, hip:N or cpu:N, got {text!r}", param="target_devices"
        )
    return DeviceName(cast(DeviceKind, match.group(1)), int(match.group(2)))


def found() -> list[Found]:
    """The GPUs that the installed drivers name, CUDA first. Needs no CuPy."""
    devices = []
    for vendor in VENDORS:
        loaded = driver.load(vendor)
        for index in range(0 if loaded is None else loaded.count()):
            assert loaded is not None
            devices.append(Found(DeviceName(vendor, index), loaded.properties(index)))
    return devices


def open_device(name: DeviceName) -> Device:
    """One device. Raises DeviceError naming it and what is missing."""
    return HostDevice(name.index) if name.kind == "cpu" else GpuDevice(name.kind, name.index)


def open_devices(names: tuple[str, ...]) -> list[Device]:
    """The devices of --target-devices, in order. `auto` is the first GPU that opens, else cpu:0.

    Raises UsageError for a bad or repeated name and DeviceError for a device that does not open; none stays open then.
    """
    wanted = [None if name == "auto" else parse(name) for name in names]
    _refuse_repeats([name for name in wanted if name is not None])
    devices = []
    with contextlib.ExitStack() as opened:
        for name in wanted:
            device = _automatic() if name is None else open_device(name)
            opened.callback(device.close)
            devices.append(device)
        _refuse_repeats([device.name for device in devices])
        opened.pop_all()
    return devices


def _refuse_repeats(names: list[DeviceName]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--target-devices: {name} is named twice", param="target_devices")


def _automatic() -> Device:
    for gpu in found():
        try:
            return open_device(gpu.name)
        except DeviceError:
            # Its driver works but CuPy or the compiler is missing; `luce doctor` says which.
            continue
    return HostDevice()
