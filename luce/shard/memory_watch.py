"""What devices have left of their memory, for people.

Whoever drives the devices looks, once a second: what another thread may ask a GPU while the first one captures a graph
is for the driver to say. Any thread may read what was seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from luce.errors import DeviceError
from luce.runtime.device import Device, Memory

#: seconds between two looks
BEAT = 1.0


class MemoryWatch:
    """`seen`: the memory of each of the devices when they were looked at last; empty before, and if one failed."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._next = 0.0
        self.seen: tuple[Memory, ...] = ()

    def look(self) -> None:
        """Ask the devices, unless that was done within a beat. For the thread that drives them."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BEAT
        try:
            self.seen = tuple(device.memory() for device in self._devices)
        except DeviceError:
            # It will say so to whoever needs it.
            self.seen = ()
