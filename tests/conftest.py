"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.emulated import EmulatedDevice

pytest_plugins = ["pytester", "tests.support.hub_server", "tests.support.selection"]

# Nothing that a test computes lands in the user's cache directory, nor comes from there.
os.environ["LUCE_KV_CACHE_DIR"] = "off"
# The reference for all devices. Tests of packed weights ask for them.
os.environ["LUCE_CPU_WEIGHTS"] = "float32"
# How long an example takes to make and to run says how loaded the machine is.
settings.register_profile("luce", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("luce")


@pytest.fixture(params=[32, 64], ids="{} lanes".format)
def emulated(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """A device that runs the kernels on the CPU, with 32 and with 64 lanes."""
    device = EmulatedDevice(request.param)
    yield device
    device.close()
