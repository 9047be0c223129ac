"""kernels/rope.cu on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.rope import rope_table
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_rope as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("half", [1, 32, 66, 256])
def test_table_of_text_positions(gpu: Device, half: int) -> None:
    checks.check_table(gpu, np.array([0, 1, 17, 4095, 262143, 1048575], np.int32), half, 1e7)


def test_table_of_positions_on_four_axes(gpu: Device) -> None:
    checks.check_table(gpu, np.array([[5, 1000, 3, 9], [262143, 0, 77777, 9]], np.int32), 10, 1e4)


def test_table_agrees_with_the_reference(gpu: Device) -> None:
    positions = np.arange(0, 1 << 20, 4097, dtype=np.int32)
    omega, axes = checks.frequencies(64, 1e6), np.zeros(64, np.int32)
    actual = gpu.download(rope_table(gpu, gpu.upload(positions), gpu.upload(omega), gpu.upload(axes)))
    np.testing.assert_allclose(actual, rope_table(HostDevice(), positions, omega, axes), rtol=0, atol=6e-8)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(
    ("n", "heads", "d", "half"), [(1, 1, 2, 1), (3, 5, 48, 24), (513, 24, 256, 32), (70000, 1, 16, 8), (9, 7, 512, 256)]
)
def test_rope(gpu: Device, n: int, heads: int, d: int, half: int, adjacent: bool) -> None:
    checks.check_rope(gpu, n, heads, d, half, adjacent=adjacent)


def test_rows_do_not_depend_on_their_neighbours(gpu: Device) -> None:
    checks.check_rows_alone(gpu, 24, 256)
