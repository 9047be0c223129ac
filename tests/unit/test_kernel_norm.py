"""kernels/norm.cu on the emulated device."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support import op_checks_norm as checks


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 63), (4, 257), (2, 1000)])
def test_rms_norm(emulated: Device, n: int, d: int) -> None:
    checks.check_rms_norm(emulated, n, d)
    checks.check_add_rms_norm(emulated, n, d)


@pytest.mark.parametrize("d", [4099, 8300, 8301])
def test_rms_norm_of_a_row_for_the_largest_block(emulated: Device, d: int) -> None:
    checks.check_rms_norm(emulated, 2, d)
    checks.check_add_rms_norm(emulated, 2, d)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 16), (3, 5, 48), (2, 3, 130)])
def test_head_norms(emulated: Device, n: int, heads: int, d: int) -> None:
    checks.check_head_rms_norm(emulated, n, heads, d)


def test_rows_do_not_depend_on_their_neighbours(emulated: Device) -> None:
    checks.check_rows_alone(emulated, 300, 3)


def test_no_rows(emulated: Device) -> None:
    checks.check_no_rows(emulated)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 32), (3, 992), (9, 64), (2, 8704)])
def test_quantised_norm(emulated: Device, n: int, d: int, adding: bool, group: int) -> None:
    checks.check_quantised_norm(emulated, n, d, adding=adding, group=group)
