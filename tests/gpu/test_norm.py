"""kernels/norm.cu on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.norm import rms_norm
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_norm as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 63), (17, 1000), (1, 5120), (513, 5120), (70000, 64), (5, 17408)])
def test_rms_norm(gpu: Device, n: int, d: int) -> None:
    checks.check_rms_norm(gpu, n, d)
    checks.check_add_rms_norm(gpu, n, d)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 16), (3, 5, 48), (16, 24, 256), (300, 48, 128), (9, 7, 512)])
def test_head_norms(gpu: Device, n: int, heads: int, d: int) -> None:
    checks.check_head_rms_norm(gpu, n, heads, d)


def test_agrees_with_the_reference(gpu: Device) -> None:
    host, x, weight = HostDevice(), checks.rows(33, 5120), checks.vector(5120)
    actual = gpu.download(rms_norm(gpu, gpu.upload(x), gpu.upload(weight), checks.EPS))
    np.testing.assert_allclose(actual, rms_norm(host, x, weight, checks.EPS), rtol=3e-6)


@pytest.mark.parametrize(("d", "heads"), [(300, 3), (5120, 40), (17408, 128)])
def test_rows_do_not_depend_on_their_neighbours(gpu: Device, d: int, heads: int) -> None:
    checks.check_rows_alone(gpu, d, heads)


def test_no_rows(gpu: Device) -> None:
    checks.check_no_rows(gpu)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 32), (3, 992), (9, 64), (2, 8704)])
def test_quantised_norm(gpu: Device, n: int, d: int, adding: bool, group: int) -> None:
    checks.check_quantised_norm(gpu, n, d, adding=adding, group=group)
