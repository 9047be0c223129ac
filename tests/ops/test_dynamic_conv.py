"""The grouped dynamic convolution, and kernels/dynamic_conv.cu."""

from __future__ import annotations

from collections.abc import Sequence

from luce.runtime.device import Device
from tests.support import op_checks_dynamic_conv as checks
from tests.support.devices import on_devices


@on_devices(
    "h, taps, group, lengths",
    [(64, 2, 16, [8]), (48, 3, 8, [6, 1, 2, 6]), (300, 4, 1, [3, 5]), (32, 1, 32, [4, 4])],
    gpu=[(5120, 2, 16, [8, 8])],
)
def test_dynamic_conv(device: Device, h: int, taps: int, group: int, lengths: Sequence[int]) -> None:
    checks.check_dynamic_conv(device, h, taps, group, lengths)
