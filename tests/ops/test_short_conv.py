"""The gated short convolution over pages, and kernels/short_conv.cu."""

from __future__ import annotations

from collections.abc import Sequence

from luce.runtime.device import Device
from tests.support import op_checks_short_conv as checks
from tests.support.devices import on_devices

LENGTHS = [[(0, 1)], [(0, 70)], [(63, 1), (0, 2), (64, 1), (65, 3), (500, 1)]]


@on_devices(
    "h, kernel, lengths",
    [(h, kernel, lengths) for h, kernel in ((8, 3), (300, 4)) for lengths in LENGTHS],
    gpu=[(2048, 3, [*LENGTHS[2], (1000, 500)])],
)
def test_short_conv(device: Device, h: int, kernel: int, lengths: Sequence[tuple[int, int]]) -> None:
    checks.check_short_conv(device, h, kernel, lengths)
