"""The devices that the settings name, and what there is to name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from luce.config.settings import Config, flag
from luce.errors import DeviceError, UsageError
from luce.runtime import driver
from luce.runtime.device import Device, DeviceKind, DeviceName
from luce.runtime.driver import Properties, Vendor
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice

VENDORS: tuple[Vendor, ...] = ("cuda", "hip")


@dataclass(frozen=True)
class Found:
    """A GPU that a driver names; it may still lack CuPy or a compiler."""

    name: DeviceName
    properties: Properties


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


def open_devices(config: Config) -> list[Device]:
    """The devices of --target-devices in their order, or the one of --target-device.

    `auto` as the only device is the first GPU that opens, else cpu:0, and its backend is this process's own. `auto:N`
    is device N of that backend; `auto` in a list stands for all its devices.

    Raises one UsageError that holds every device that does not exist or is named twice, and GPUs of two vendors, of
    which one process drives only one. Raises DeviceError for a device that does not open; none stays open then.
    """
    if not config.target_devices and config.target_device == "auto":
        return [_automatic()]
    field = "target_devices" if config.target_devices else "target_device"
    items = config.target_devices or (config.target_device,)
    return open_all(named(items), field, meant=",".join(items))


def open_all(
    names: Sequence[DeviceName], field: str, *, beside: Sequence[DeviceName] = (), meant: str = ""
) -> list[Device]:
    """Devices of this process in order. Raises as open_devices.

    `field` is the setting that names them, `meant` its text, if that is another one than their names; `beside`: others
    that this process has open.
    """
    problems = list(_problems(names, beside, meant))
    if problems:
        raise UsageError("; ".join(f"{flag(field)} {problem}" for problem in problems), param=field)
    devices = []
    with contextlib.ExitStack() as opened:
        for name in names:
            device = open_device(name)
            opened.callback(device.close)
            devices.append(device)
        opened.pop_all()
    return devices


def named(items: Sequence[str]) -> list[DeviceName]:
    """The devices that checked items mean. This process's own backend is looked for only if one asks for it."""
    own: DeviceKind = "cpu"
    if any(item.startswith("auto") for item in items):
        with contextlib.closing(_automatic()) as device:
            own = device.name.kind
    names = []
    for item in items:
        place, slash, local = item.rpartition("/")
        kind, _, index = local.partition(":")
        indices = [int(index)] if index else range(1 if own == "cpu" else _count(own))
        names += [DeviceName(own if kind == "auto" else cast(DeviceKind, kind), i, place + slash) for i in indices]
    return names


def _problems(names: Sequence[DeviceName], beside: Sequence[DeviceName], meant: str) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{name}: named twice" + (f", as {meant} is {','.join(map(str, names))}" if "auto" in meant else "")
        if name.place:
            yield f"{name}: is no device of this machine"
        if name.kind == "cpu" or name.place:
            continue
        count = _count(name.kind)
        if not count:
            yield f"{name}: no {name.kind} devices are available: {driver.absence(name.kind)} (luce doctor tells more)"
        elif name.index >= count:
            yield f"{name}: index {name.index} is out of range [0, {count})"
    together = [*beside, *names]
    if {name.kind for name in together} >= set(VENDORS):
        listed, needed = ",".join(map(str, together)), flag("draft_ipc_bin" if beside else "target_shard_ipc_bin")
        yield f"{listed}: one process drives GPUs of one vendor, cuda or hip; for the other one give {needed}"


def _count(vendor: Vendor) -> int:
    loaded = driver.load(vendor)
    return 0 if loaded is None else loaded.count()


def _automatic() -> Device:
    for gpu in found():
        try:
            return open_device(gpu.name)
        except DeviceError:
            # Its driver works but CuPy or the compiler is missing; `luce doctor` says which.
            continue
    return HostDevice()
