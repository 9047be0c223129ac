"""A device with a given amount of memory, for plans."""

from __future__ import annotations

from luce.runtime.device import DeviceName, Memory
from luce.runtime.host import HostDevice

GIB = 1 << 30


class Sized(HostDevice):
    """A host with a memory of its own, or the part of a GPU that a plan reads."""

    def __init__(self, name: str, free: int) -> None:
        kind, _, index = name.partition(":")
        super().__init__(int(index))
        self.host = kind == "cpu"
        self.name = DeviceName(kind, int(index))  # type: ignore[arg-type]
        self._free = free

    def memory(self) -> Memory:
        return Memory(self._free, self._free)
