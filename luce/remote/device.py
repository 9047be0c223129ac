"""A device in another process, as the server sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import DTypeLike

from luce.ipc.arena import Arena
from luce.ipc.supervisor import Supervisor
from luce.runtime.device import Array, Device, DeviceName, Event, Memory
from luce.runtime.host import HostDevice, HostEvent

#: how the places of a cluster's members begin: `member://name/`
MEMBER = "member://"


@dataclass(frozen=True)
class Transport:
    """How activations travel to and from a daemon."""

    #: whether in shared memory, which may turn out to be impossible; otherwise in messages
    shared: bool = True
    #: whether it is an error if memory cannot be shared
    required: bool = False
    #: the type of activations in messages: one of luce.remote.activation_codec.TYPES
    activations: str = "f32"


class RemoteDevice(HostDevice):
    """Stands for a device of a daemon while layers are planned, and for the arena while steps run.

    Its arrays are NumPy arrays; `zeros` allocates them in the arena, once the shard has made one. Its work is what the
    shard has requested of the daemon. Closing it ends the daemon. Waits for the daemon; raises LuceError if that has
    not started.
    """

    remote = True

    def __init__(
        self, name: DeviceName, daemon: Supervisor, number: int = 0, transport: Transport | None = None
    ) -> None:
        super().__init__(name.index)
        facts = daemon.hello().devices[number]
        self.name = name
        self.daemon = daemon
        self.transport = transport or Transport()
        self.host = facts.host
        self.packed = facts.packed
        self.lanes = facts.lanes
        self.kv_dtype = np.dtype(facts.kv_dtype)
        #: bytes of weights that it holds for the next load
        self.kept = facts.kept
        self._facts = facts
        #: which of the daemon's devices it is
        self.number = number
        #: the shard's
        self.arena: Arena | None = None
        #: returns the event after which everything requested so far is done; the shard's
        self.last_event: Callable[[], Event] = HostEvent

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        assert self.arena is not None and isinstance(shape, int)
        size = shape * np.dtype(dtype).itemsize
        at = self.arena.allocate(size)
        return self.arena.memory[at : at + size].view(dtype)

    def record(self, *, timing: bool = False) -> Event:
        return self.last_event()

    def synchronize(self) -> None:
        self.last_event().wait()

    def memory(self) -> Memory:
        """As the daemon reported it last."""
        return self.reported_memory() or Memory(self._facts.free, self._facts.total)

    def reported_memory(self) -> Memory | None:
        """Memory at the last heartbeat, None while the daemon is not running. Any thread may call it."""
        seen = self.daemon.memory()
        return seen[self.number] if seen else None

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
