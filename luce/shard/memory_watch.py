"""Free memory of devices, for reports.

The thread that drives the devices updates the figures at most once a second: only this thread knows which calls a GPU
allows while a graph is being captured. Any thread may read them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from luce.errors import DeviceError
from luce.runtime.device import Device, Memory

#: least seconds between two updates
INTERVAL = 1.0


class MemoryWatch:
    """The memory of each device at the last update."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._next = 0.0
        #: memory of each device; empty before the first update, and if a device failed
        self.seen: tuple[Memory, ...] = ()

    def update(self) -> None:
        """Ask the devices, unless the last update is less than INTERVAL ago. For the thread that drives them."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        try:
            self.seen = tuple(device.memory() for device in self._devices)
        except DeviceError:
            # The next call that needs the device raises the error.
            self.seen = ()
