"""The figures of simulated devices and of their links, which nothing measures: their file says them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from gguf import GGMLQuantizationType

from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Device
from luce.runtime.simulated import SimulatedDevice


def simulated_profile(device: Device, types: Iterable[GGMLQuantizationType]) -> DeviceProfile:
    """The profile of a simulated device, with the same figures for each of these types of weights."""
    assert isinstance(device, SimulatedDevice)
    own = device.figures
    format = FormatProfile(own.read, dict(own.rates), own.unpack, 0.0, False, dict(own.gather))
    return DeviceProfile(
        str(device.name),
        own.name,
        time.time(),
        own.step,
        own.launch,
        LinkProfile(own.way.latency, own.way.bandwidth),
        {type.name: format for type in types},
        state_read=own.state_read,
        attention=own.attention,
        elementwise=own.elementwise,
        recurrence=own.recurrence,
    )


def simulated_links(devices: Sequence[Device]) -> dict[tuple[str, str], LinkProfile]:
    """The links between the simulated ones of some devices."""
    names = {str(device.name) for device in devices}
    return {
        (link.before, link.behind): LinkProfile(link.latency, link.bandwidth)
        for device in devices[:1]
        if isinstance(device, SimulatedDevice)
        for link in device.machine.links
        if {link.before, link.behind} <= names
    }
