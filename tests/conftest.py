"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.emulated import EmulatedDevice


@pytest.fixture(params=[32, 64], ids="{} lanes".format)
def emulated(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """A device that runs the kernels on the CPU, with 32 and with 64 lanes."""
    device = EmulatedDevice(request.param)
    yield device
    device.close()
