"""The GPUs that this machine's drivers report."""

from __future__ import annotations

from dataclasses import dataclass

from luce.runtime import driver
from luce.runtime.device import DeviceName
from luce.runtime.driver import Properties, Vendor

VENDORS: tuple[Vendor, ...] = ("cuda", "hip")


@dataclass(frozen=True)
class Found:
    """A GPU that a driver reports; CuPy or a compiler may still be missing."""

    name: DeviceName
    properties: Properties


def found() -> list[Found]:
    """The GPUs that the installed drivers report, CUDA first. Needs no CuPy."""
    devices = []
    for vendor in VENDORS:
        loaded = driver.load(vendor)
        for index in range(0 if loaded is None else loaded.count()):
            assert loaded is not None
            devices.append(Found(DeviceName(vendor, index), loaded.properties(index)))
    return devices
