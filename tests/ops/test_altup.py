"""AltUp and gates of which the largest count, and kernels/altup.cu."""

from __future__ import annotations

from luce.runtime.device import Device
from tests.support import op_checks_altup as checks
from tests.support.devices import on_devices

SIZES, LARGE = [(1, 8), (3, 300)], [(1, 2048), (500, 2048)]


@on_devices("n, hidden", SIZES, gpu=LARGE)
def test_predict(device: Device, n: int, hidden: int) -> None:
    checks.check_predict(device, n, hidden)


@on_devices("n, hidden", SIZES, gpu=LARGE)
def test_correct(device: Device, n: int, hidden: int) -> None:
    checks.check_correct(device, n, hidden)


@on_devices("n, d", SIZES, gpu=LARGE)
def test_match_magnitude(device: Device, n: int, d: int) -> None:
    checks.check_match_magnitude(device, n, d)


@on_devices(
    "n, d, deviations",
    [(*size, deviations) for size in SIZES for deviations in (1.6449, -0.5)],
    gpu=[(500, 8192, 1.6449)],
)
def test_keep_largest(device: Device, n: int, d: int, deviations: float) -> None:
    checks.check_keep_largest(device, n, d, deviations)


@on_devices("n, d", [(5, 300)], gpu=[(500, 2048)])
def test_rows_are_independent(device: Device, n: int, d: int) -> None:
    checks.check_rows_are_independent(device, n, d)
