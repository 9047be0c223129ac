"""Simulated devices for which CPUs compute: the same bits as on one CPU, over links and by the host, beside a real CPU,
and after restores."""

from __future__ import annotations

import numpy as np
import pytest

from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.simulated import SimulatedDevice
from tests.support.make_driver import MakeDriver
from tests.support.placements import placement_results
from tests.support.reference import Reference
from tests.support.simulated import card, machine


# Recurrent layers; layers that borrow keys and values of a layer before the boundary.
@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32"])
def test_bits_are_those_of_one_cpu(name: str, make_driver: MakeDriver) -> None:
    reference = Reference(name)
    whole = placement_results(make_driver(reference, [HostDevice()]), reference)
    for linked in (True, False):
        both = machine(card(computes=True), card(computes=True), linked=linked)
        first, second = (SimulatedDevice(both, index, HostDevice(index)) for index in (0, 1))
        placements: list[list[Device]] = [[first, second], [first, HostDevice(2)], [HostDevice(2), second]]
        for devices in placements:
            driver = make_driver(reference, devices, weights=(1, 1))
            assert [part.device for part in driver.backend.devices] == [str(device.name) for device in devices]
            np.testing.assert_array_equal(placement_results(driver, reference), whole)
