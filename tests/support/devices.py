"""The devices that an op's tests run on, and which cases each of them gets.

`on_devices` parametrises a test by the fixture `device` (tests/ops/conftest.py) and the names of its other arguments.
Cases of a GPU carry the mark `gpu`; without a GPU there are none. Cases differ between devices because a GPU computes
what would take the emulated device minutes, and only large shapes show some faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice
from tests.support.selection import gpu_present

HOST = ("host", "compiled")
COMPILED = ("compiled",)
EMULATED = ("emulated, 32 lanes", "emulated, 64 lanes")
GPU = ("gpu",)
#: the paths of attention: products of tiles by four waves and by one, and both lane counts without such products
ATTENTION_EMULATED = ("emulated, wgmma", "emulated, mma", "emulated, portable", "emulated, portable, 64 lanes")
ATTENTION_GPU = ("gpu", "gpu, portable")

#: lanes and matrix instructions of each emulated device; None: those that EmulatedDevice has by default
_EMULATED: dict[str, tuple[int, tuple[str, ...] | None]] = {
    "emulated, 32 lanes": (32, None),
    "emulated, 64 lanes": (64, None),
    "emulated, wgmma": (32, ("F16", "BF16", "WGMMA")),
    "emulated, mma": (32, ("F16", "BF16")),
    "emulated, portable": (32, ()),
    "emulated, portable, 64 lanes": (64, ()),
}

Cases = Iterable[Any] | None


def on_devices(
    names: str = "",
    cases: Cases = None,
    *,
    host: Cases = None,
    emulated: Cases = None,
    gpu: Cases = None,
    host_devices: tuple[str, ...] = HOST,
    emulated_devices: tuple[str, ...] = EMULATED,
    gpu_devices: tuple[str, ...] = GPU,
) -> pytest.MarkDecorator:
    """Run a test on the NumPy device, the emulated devices and a GPU, with its arguments `names` from the cases.

    `host`, `emulated` and `gpu` replace `cases` on one kind of device; an empty list leaves the kind out. Without
    names, the test runs once on each device.
    """
    arguments = [name.strip() for name in names.split(",") if name.strip()]
    common = None if cases is None else list(cases)
    params = []
    for devices, own in ((host_devices, host), (emulated_devices, emulated), (gpu_devices, gpu)):
        chosen = own if own is not None else common
        rows = [()] if chosen is None else [(case,) if len(arguments) == 1 else tuple(case) for case in chosen]
        # A test of a GPU alone keeps its cases, which the mark leaves out: a test without cases would be skipped.
        if devices is gpu_devices and params and not gpu_present():
            continue
        marks = [pytest.mark.gpu] if devices is gpu_devices else []
        params += [pytest.param(device, *row, marks=marks) for device in devices for row in rows]
    return pytest.mark.parametrize(["device", *arguments], params, indirect=["device"])


#: the test runs without a GPU on both emulated devices alone
emulated_only = on_devices(host=[], gpu=[])
#: the test runs on one emulated device: with 32 lanes, and with the matrix instructions of Hopper
emulated_32 = on_devices(host=[], gpu=[], emulated_devices=("emulated, 32 lanes",))
emulated_wgmma = on_devices(host=[], gpu=[], emulated_devices=("emulated, wgmma",))


def opened(name: str, request: pytest.FixtureRequest) -> Iterator[Device]:
    """The device of a name above, closed afterwards; a GPU is the session's fixture `gpu`."""
    if name == "host":
        yield HostDevice()
    elif name == "compiled":
        yield CpuDevice()
    elif name in _EMULATED:
        lanes, products = _EMULATED[name]
        device = EmulatedDevice(lanes, products=products)
        yield device
        device.close()
    else:
        gpu: GpuDevice = request.getfixturevalue("gpu")
        with pytest.MonkeyPatch.context() as patch:
            if name == "gpu, portable":
                patch.setattr(gpu, "products", frozenset())
            yield gpu
