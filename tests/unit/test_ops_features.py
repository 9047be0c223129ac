"""Captured hidden states on the host and on the emulated device."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_features as checks


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (17, 300)])
def test_capture_on_the_host(rows: int, hidden: int) -> None:
    checks.check_capture(HostDevice(), rows, hidden)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (3, 300)])
def test_capture(emulated: Device, rows: int, hidden: int) -> None:
    checks.check_capture(emulated, rows, hidden)


def test_ring_on_the_host() -> None:
    checks.check_ring(HostDevice())


def test_ring(emulated: Device) -> None:
    checks.check_ring(emulated)


def test_tails_on_the_host() -> None:
    checks.check_tails(HostDevice(), 6)


def test_tails(emulated: Device) -> None:
    checks.check_tails(emulated, 6)
