"""Weights that small models of one file share on a device: of drafting, prompt compression, KVFlash's policy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.ops.weight import Weight
from luce.runtime.device import Device


class WeightPool:
    """Weights by file and device, each for as long as anybody holds it. Thread-safe.

    Devices of one name share their memory, also those that different threads use.
    """

    def __init__(self) -> None:
        #: held while a weight is loaded, so that nobody else loads it meanwhile
        self._lock = threading.Lock()
        self._weights: weakref.WeakValueDictionary[tuple[Any, ...], Weight] = weakref.WeakValueDictionary()
        self._planned: set[tuple[str, str]] = set()

    def plan(self, file: GGUFFile, device: Device) -> bool:
        """Note that a user of a file's weights on a device is planned. Whether there was one already, with whose memory
        these weights count. Never those of a daemon, which has a process of its own."""
        if device.remote:
            return False
        planned = fingerprint(file), str(device.name)
        known = planned in self._planned
        self._planned.add(planned)
        return known

    def weight(self, key: tuple[Any, ...], device: Device, load: Callable[[], Weight]) -> Weight:
        """The weight of a key on a device, loaded if nobody holds it. Raises the errors of `load`."""
        with self._lock:
            found = self._weights.get(key)
            if found is None:
                found = load()
                # Other threads use it on streams of their own.
                device.synchronize()
                self._weights[key] = found
            return found
