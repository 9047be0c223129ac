"""The memory of a member's devices, as far as it is known without opening them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from luce.cluster.wire import DeviceMemory
from luce.runtime import driver
from luce.runtime.host import host_memory


def lent_memory(devices: Sequence[str]) -> Callable[[], tuple[DeviceMemory, ...]]:
    """What returns the memory of local devices now. How much of a GPU is free is not asked: a process that asks takes
    some of it."""
    totals = {device: _total(device) for device in devices}

    def now() -> tuple[DeviceMemory, ...]:
        host = host_memory()
        of_host = DeviceMemory(host.free, host.total)
        return tuple(of_host if device.startswith("cpu:") else DeviceMemory(None, totals[device]) for device in devices)

    return now


def _total(device: str) -> int | None:
    kind, _, index = device.partition(":")
    loaded = driver.load("hip" if kind == "hip" else "cuda") if kind != "cpu" else None
    known = loaded is not None and int(index) < loaded.count()
    return loaded.properties(int(index)).memory if loaded is not None and known else None
