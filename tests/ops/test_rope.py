"""The rotary embedding and kernels/rope.cu against exact angles and float64 products."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.rope import rope_table
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_rope as checks
from tests.support.devices import on_devices

POSITIONS = [0, 1, 17, 262143, 1048575]


@on_devices(
    "half, positions",
    [(half, POSITIONS) for half in (1, 4, 66)],
    gpu=[(half, [0, 1, 17, 4095, 262143, 1048575]) for half in (1, 32, 66, 256)],
)
def test_table_of_text_positions(device: Device, half: int, positions: list[int]) -> None:
    checks.check_table(device, np.array(positions, np.int32), half, 1e7)


@on_devices()
def test_table_of_positions_on_four_axes(device: Device) -> None:
    checks.check_table(device, np.array([[5, 1000, 3, 9], [262143, 0, 77777, 9]], np.int32), 10, 1e4)


@on_devices("half", [1, 48, 65], gpu=[1, 48, 65, 256])
def test_table_of_stretched_sequences(device: Device, half: int) -> None:
    checks.check_stretched(device, half)


@on_devices(host=[], emulated=[])
def test_table_agrees_with_the_reference(device: Device) -> None:
    positions = np.arange(0, 1 << 20, 4097, dtype=np.int32)
    omega, axes = checks.frequencies(64, 1e6), np.zeros(64, np.int32)
    actual = device.download(rope_table(device, device.upload(positions), device.upload(omega), device.upload(axes)))
    np.testing.assert_allclose(actual, rope_table(HostDevice(), positions, omega, axes), rtol=0, atol=6e-8)


@pytest.mark.parametrize("adjacent", [False, True])
@on_devices(
    "n, heads, d, half",
    [(1, 1, 2, 1), (3, 5, 48, 24), (4, 3, 64, 16), (2, 7, 80, 33)],
    gpu=[(1, 1, 2, 1), (3, 5, 48, 24), (513, 24, 256, 32), (70000, 1, 16, 8), (9, 7, 512, 256)],
)
def test_rope(device: Device, n: int, heads: int, d: int, half: int, adjacent: bool) -> None:
    checks.check_rope(device, n, heads, d, half, adjacent=adjacent)


@on_devices("heads, d", [(3, 16)], gpu=[(24, 256)])
def test_rows_do_not_depend_on_their_neighbours(device: Device, heads: int, d: int) -> None:
    checks.check_rows_alone(device, heads, d)


@on_devices("n, heads, d", [(1, 1, 8), (3, 5, 48), (2, 3, 128)], gpu=[(1, 1, 8), (3, 5, 48), (512, 32, 128)])
def test_temper(device: Device, n: int, heads: int, d: int) -> None:
    checks.check_temper(device, n, heads, d)
