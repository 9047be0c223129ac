"""Device names to devices, and the devices of this machine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

from luce.config.environment import SIMULATED_DEVICES, environment
from luce.config.settings import Config, flag
from luce.errors import DeviceError, UsageError
from luce.runtime import driver
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device, DeviceKind, DeviceName
from luce.runtime.driver import Vendor
from luce.runtime.found import VENDORS, found
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice, host_memory

# By setting of devices, the setting that starts daemons for those of the other vendor.
_DAEMONS = {
    "target_device": "target_shard_ipc_bin",
    "target_devices": "target_shard_ipc_bin",
    "draft_device": "draft_ipc_bin",
    "prefill_drafter_device": "target_shard_ipc_bin",
}


def open_device(name: DeviceName, cpu_weights: str) -> Device:
    """Open one device; `cpu_weights` as in Config. Raises DeviceError with the device and the missing part."""
    if name.simulated:
        from luce.runtime.simulated import open_simulated

        return open_simulated(name.index, lambda: open_device(DeviceName("cpu", name.index), cpu_weights))
    if name.vendor is not None:
        return GpuDevice(name.vendor, name.index)
    return CpuDevice(name.index) if cpu_weights == "packed" else HostDevice(name.index)


def open_expert_cpu(devices: Sequence[Device], cpu_weights: str) -> Device:
    """A CPU device for experts of layers on these devices: the first one that is not among them."""
    taken = {device.name for device in devices}
    index = next(index for index in itertools.count() if DeviceName("cpu", index) not in taken)
    return open_device(DeviceName("cpu", index), cpu_weights)


def open_devices(config: Config) -> list[Device]:
    """Open the devices of --target-devices in order, or the one of --target-device.

    `auto` as the only device means the first GPU that opens, otherwise cpu:0; its kind is that of this process.
    `auto:N` is device N of that kind, and `auto` in a list stands for all its devices.

    Raises one UsageError for all devices that do not exist or are named twice, and for GPUs of two vendors, of which a
    process drives one. Raises DeviceError if a device does not open, and closes the others.
    """
    if not config.target_devices and config.target_device == "auto":
        return [_automatic(config.cpu_weights)]
    field = "target_devices" if config.target_devices else "target_device"
    items = config.target_devices or (config.target_device,)
    return open_all(named(items), field, config.cpu_weights, meant=",".join(items))


def open_all(
    names: Sequence[DeviceName],
    field: str,
    cpu_weights: str,
    *,
    beside: Sequence[DeviceName] = (),
    meant: str = "",
) -> list[Device]:
    """Open devices of this process in order. Raises the errors of open_devices.

    `field` is the setting that names them, `meant` its text if it differs from the names; `beside` are other devices
    that this process has open.
    """
    problems = list(_problems(names, field, beside, meant))
    if problems:
        raise UsageError("; ".join(f"{flag(field)} {problem}" for problem in problems), param=field)
    devices = []
    with contextlib.ExitStack() as opened:
        for name in names:
            device = open_device(name, cpu_weights)
            opened.callback(device.close)
            devices.append(device)
        opened.pop_all()
    return devices


def named(items: Sequence[str]) -> list[DeviceName]:
    """The devices that valid items of the setting mean. Only `auto` makes this process look for its own kind."""
    own = DeviceName("cpu", 0)
    if any(item.startswith("auto") for item in items):
        with contextlib.closing(_automatic("float32")) as device:
            own = device.name
    names = []
    for item in items:
        place, slash, local = item.rpartition("/")
        kind, _, index = local.partition(":")
        indices = [int(index)] if index else range(1 if own.vendor is None else _count(own.vendor))
        meant = own.kind if kind == "auto" else cast(DeviceKind, kind)
        names += [DeviceName(meant, i, place + slash) for i in indices]
    return names


def total_memory(config: Config) -> tuple[int, list[str]]:
    """Bytes of memory of the devices of the settings that are in this machine, and their names. None is opened, except
    to find what `auto` is."""
    if not config.target_devices and config.target_device == "auto":
        with contextlib.closing(_automatic(config.cpu_weights)) as device:
            return device.memory().total, [str(device.name)]
    total, counted = 0, []
    for name in named(config.target_devices or (config.target_device,)):
        if name.simulated:
            simulated = _simulated_memory()
            total += simulated[name.index] if name.index < len(simulated) else 0
            counted.append(str(name))
            continue
        loaded = None if name.place or name.vendor is None else driver.load(name.vendor)
        if loaded is not None and name.index < loaded.count():
            total += loaded.properties(name.index).memory
            counted.append(str(name))
        elif name.kind == "cpu" and not name.place and not any(other.startswith("cpu") for other in counted):
            # All CPU devices share the memory.
            total += host_memory().total
            counted.append(str(name))
    return total, counted


def _problems(names: Sequence[DeviceName], field: str, beside: Sequence[DeviceName], meant: str) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{name}: named twice" + (f", as {meant} is {','.join(map(str, names))}" if "auto" in meant else "")
        if name.place:
            yield f"{name}: is not a device of this machine"
        if name.place:
            continue
        if name.simulated and name.index >= (count := len(_simulated_memory())):
            yield f"{name}: the file of {SIMULATED_DEVICES} has {count} devices"
        if name.vendor is None:
            continue
        count = _count(name.vendor)
        if not count:
            yield f"{name}: no {name.vendor} devices are available: {driver.absence(name.vendor)} (see `luce doctor`)"
        elif name.index >= count:
            yield f"{name}: index {name.index} is out of range [0, {count})"
    together = [*beside, *names]
    if {name.kind for name in together} >= set(VENDORS):
        listed, daemons = ",".join(map(str, together)), _DAEMONS.get(field)
        other = "" if daemons is None else f"; use {flag(daemons)} for the other"
        yield f"{listed}: one process drives GPUs of one vendor, cuda or hip{other}"


def _simulated_memory() -> list[int]:
    """Bytes of the simulated devices. Raises UsageError for a bad file of them."""
    if environment(SIMULATED_DEVICES) is None:
        return []
    from luce.runtime.simulated_file import read_simulated

    return [device.free for device in read_simulated().devices]


def _count(vendor: Vendor) -> int:
    """GPUs of a vendor."""
    loaded = driver.load(vendor)
    return 0 if loaded is None else loaded.count()


def _automatic(cpu_weights: str) -> Device:
    for gpu in found():
        try:
            return open_device(gpu.name, cpu_weights)
        except DeviceError:
            # The driver works, but CuPy or the compiler is missing; `luce doctor` shows which.
            continue
    return open_device(DeviceName("cpu", 0), cpu_weights)
