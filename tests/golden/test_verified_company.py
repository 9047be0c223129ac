"""Steps of more than 16 verified rows: each row has the bits that it has alone, on every device that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from luce.ops.matmul import FEW_ROWS
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.shard.graphs import MAX_ROWS
from tests.support.drive import Driver
from tests.support.emulated import EmulatedDevice
from tests.support.golden_checks import check_company
from tests.support.wide_model import VOCAB, open_wide


class Wide:
    """Opens a model of K quants on devices."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder

    def driver(self, *devices: Device, kind: str = "Q4_K", experts: str = "") -> Driver:
        options = {"context": 64, "verify_rows": 16}
        return open_wide(self._stack, self._folder, *devices, kind=kind, experts=experts, **options)


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Wide]:
    with ExitStack() as stack:
        yield Wide(stack, tmp_path)


@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_by_the_kernels_of_gpus(wide: Wide, kind: str) -> None:
    """A recurrent layer and one of attention, on a device of tensor cores."""
    check_company(wide.driver(EmulatedDevice(), kind=kind), VOCAB, 20)


@pytest.mark.emulated
def test_of_experts_by_the_kernels_of_gpus(wide: Wide) -> None:
    check_company(wide.driver(EmulatedDevice(), experts="Q4_K"), VOCAB, 20)


@pytest.mark.gpu
def test_on_a_gpu(wide: Wide, gpu: Device) -> None:
    for driver in (wide.driver(gpu), wide.driver(gpu, experts="Q4_K")):
        for rows in (17, 33, 64):
            check_company(driver, VOCAB, rows)


def test_by_two_shards_of_the_cpu(wide: Wide) -> None:
    for experts in ("", "Q4_K"):
        driver = wide.driver(CpuDevice(0), CpuDevice(1), experts=experts)
        for rows in (17, 64):
            check_company(driver, VOCAB, rows)


@pytest.mark.emulated
def test_what_devices_say(wide: Wide) -> None:
    """The fewest rows of all shards: NumPy, and GPUs with other formats, multiply more rows than 16 in another way."""
    emulated = EmulatedDevice()
    assert wide.driver(CpuDevice()).backend.capacity.invariant_rows == MAX_ROWS
    assert wide.driver(HostDevice()).backend.capacity.invariant_rows == FEW_ROWS
    assert wide.driver(CpuDevice(), HostDevice(1)).backend.capacity.invariant_rows == FEW_ROWS
    assert wide.driver(emulated).backend.capacity.invariant_rows == MAX_ROWS
    assert wide.driver(CpuDevice(), emulated).backend.capacity.invariant_rows == MAX_ROWS
    assert wide.driver(emulated, experts="Q4_K").backend.capacity.invariant_rows == MAX_ROWS
    assert wide.driver(emulated, experts="Q5_1").backend.capacity.invariant_rows == FEW_ROWS
    assert wide.driver(emulated, kind="Q8_0").backend.capacity.invariant_rows == FEW_ROWS
    emulated.shared_limit = 64 << 10
    assert wide.driver(emulated).backend.capacity.invariant_rows == FEW_ROWS
