"""Captured hidden states, their ring, and kernels/features.cu."""

from __future__ import annotations

from luce.runtime.device import Device
from tests.support import op_checks_features as checks
from tests.support.devices import on_devices


@on_devices("rows, hidden", host=[(1, 8), (17, 300)], emulated=[(1, 8), (3, 300)], gpu=[(17, 5120)])
def test_capture(device: Device, rows: int, hidden: int) -> None:
    checks.check_capture(device, rows, hidden)


@on_devices()
def test_ring(device: Device) -> None:
    checks.check_ring(device)


@on_devices("hiddens", [[6]], gpu=[[6, 5120]])
def test_tails(device: Device, hiddens: list[int]) -> None:
    for hidden in hiddens:
        checks.check_tails(device, hidden)
