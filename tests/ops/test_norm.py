"""The norms and kernels/norm.cu against float64."""

from __future__ import annotations

import itertools

import numpy as np

from luce.ops.norm import rms_norm
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_norm as checks
from tests.support.devices import on_devices


@on_devices(
    "n, d",
    host=[(1, 1), (3, 63), (8, 5120), (21, 576)],
    emulated=[(1, 1), (3, 63), (4, 257), (2, 1000)],
    gpu=[(1, 1), (3, 63), (17, 1000), (1, 5120), (513, 5120), (70000, 64), (5, 17408)],
)
def test_rms_norm(device: Device, n: int, d: int) -> None:
    checks.check_rms_norm(device, n, d)
    checks.check_add_rms_norm(device, n, d)


@on_devices(
    "n, d, biased",
    [(1, 1, True), (3, 63, False), (4, 257, True), (2, 1000, True)],
    gpu=[(3, 63, False), (17, 1000, True), (513, 4096, False), (5, 12288, True)],
)
def test_layer_norm(device: Device, n: int, d: int, biased: bool) -> None:
    checks.check_layer_norm(device, n, d, biased=biased)


@on_devices("d", host=[], emulated=[4099, 8300, 8301], gpu=[])
def test_rms_norm_of_a_row_for_the_largest_block(device: Device, d: int) -> None:
    checks.check_rms_norm(device, 2, d)
    checks.check_add_rms_norm(device, 2, d)


@on_devices(
    "n, heads, d",
    host=[(1, 1, 16), (3, 5, 48), (4, 24, 256)],
    emulated=[(1, 1, 16), (3, 5, 48), (2, 3, 130)],
    gpu=[(1, 1, 16), (3, 5, 48), (16, 24, 256), (300, 48, 128), (9, 7, 512)],
)
def test_head_norms(device: Device, n: int, heads: int, d: int) -> None:
    checks.check_head_rms_norm(device, n, heads, d)


@on_devices(host=[], emulated=[])
def test_agrees_with_the_reference(device: Device) -> None:
    host, x, weight = HostDevice(), checks.rows(33, 5120), checks.vector(5120)
    actual = device.download(rms_norm(device, device.upload(x), device.upload(weight), checks.EPS))
    np.testing.assert_allclose(actual, rms_norm(host, x, weight, checks.EPS), rtol=3e-6)


@on_devices("d, heads", host=[], emulated=[(300, 3)], gpu=[(300, 3), (5120, 40), (17408, 128)])
def test_rows_do_not_depend_on_their_neighbours(device: Device, d: int, heads: int) -> None:
    checks.check_rows_alone(device, d, heads)


@on_devices()
def test_no_rows(device: Device) -> None:
    checks.check_no_rows(device)


SHAPES = [(1, 32), (3, 992), (9, 64), (2, 8704)]
QUANTISED = [(*shape, adding, group) for shape, adding, group in itertools.product(SHAPES, (False, True), (32, 128))]


@on_devices("n, d, adding, group", QUANTISED, host=[])
def test_quantised_norm(device: Device, n: int, d: int, adding: bool, group: int) -> None:
    checks.check_quantised_norm(device, n, d, adding=adding, group=group)


@on_devices(
    "n, d",
    host=[],
    emulated=[(3, 63), (4, 260), (3, 2500), (2, 8000), (2, 8300), (2, 8301)],
    gpu=[(9, 5120), (3, 63), (5, 17408), (700, 5120), (1000, 2048), (300, 8192)],
)
def test_norm_as_fp16(device: Device, n: int, d: int) -> None:
    for adding in (False, True):
        checks.check_fp16_norm(device, n, d, adding=adding)


@on_devices("d", host=[], emulated=[260], gpu=[5120])
def test_norm_as_fp16_of_rows_that_wide_loads_do_not_reach(device: Device, d: int) -> None:
    checks.check_fp16_norm(device, 4, d, adding=True, beside=5, top=-2)
    checks.check_fp16_norm(device, 4, d, adding=True, more_beside=1)


@on_devices("n, d", host=[], emulated=[(3, 64), (4, 264), (2, 8304)], gpu=[(9, 5120), (3, 64), (5, 17408)])
def test_added_halves(device: Device, n: int, d: int) -> None:
    checks.check_added_halves(device, n, d)
    checks.check_added_halves(device, n, d, beside=5, top=-2)
