"""A device of another process, as the server sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
from numpy.typing import DTypeLike

from luce.ipc.arena import Arena
from luce.ipc.supervisor import Supervisor
from luce.runtime.device import Array, Device, DeviceName, Event, Memory
from luce.runtime.host import HostDevice, HostEvent


class RemoteDevice(HostDevice):
    """Stands for a device while layers are planned, and for the memory that its process shares while steps run.

    Arrays are NumPy arrays here; `zeros` takes them from the arena, once the shard has made one. Its work is what the
    shard has asked the daemon for. Closing it ends the daemon. `number`: which of the daemon's devices it is. Waits for
    the daemon, and raises LuceError if it did not start.
    """

    remote = True

    def __init__(self, name: DeviceName, daemon: Supervisor, number: int = 0) -> None:
        super().__init__(name.index)
        facts = daemon.hello().devices[number]
        self.name = name
        self.daemon = daemon
        self.host = facts.host
        self.lanes = facts.lanes
        self.kv_dtype = np.dtype(facts.kv_dtype)
        self._facts = facts
        self._number = number
        self.arena: Arena | None = None
        #: the moment when all that was asked for is done; the shard's
        self.moment: Callable[[], Event] = HostEvent

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        assert self.arena is not None and isinstance(shape, int)
        size = shape * np.dtype(dtype).itemsize
        at = self.arena.take(size)
        return self.arena.memory[at : at + size].view(dtype)

    def record(self, *, timing: bool = False) -> Event:
        return self.moment()

    def synchronize(self) -> None:
        self.moment().wait()

    def memory(self) -> Memory:
        """As its process saw it last."""
        return self.left() or Memory(self._facts.free, self._facts.total)

    def left(self) -> Memory | None:
        """The same, None while the process is not there. Any thread may ask."""
        seen = self.daemon.memory()
        return seen[self._number] if seen else None

    def describe(self) -> dict[str, str | int]:
        return self._facts.facts

    def close(self) -> None:
        self.daemon.close()


def is_remote(device: Device) -> TypeGuard[RemoteDevice]:
    """Whether a device belongs to another process."""
    return device.remote


def same_daemon(one: Device | None, other: Device) -> bool:
    """Whether both are devices of one daemon."""
    return one is not None and is_remote(one) and is_remote(other) and one.daemon is other.daemon
