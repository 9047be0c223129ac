"""Simulated devices, for tests of placements and of the pipeline where there are no such devices: `sim:0`, `sim:1`, ...

The file of LUCE_SIM_DEVICES (luce.runtime.simulated_file) says how much memory they have, and how fast they and their
links are. A device has a queue as a GPU has: what is queued begins when what was queued before it is done, and not
before now; only a wait for an event takes time of the host. So a queue is a number, the time at which it is empty.

Kernels do not run: an op that launches one fails. Layers take their time by `take` (luce.backend.simulated_shard), or
run on the `cpu` of a device that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime.device import Array, CopyStream, Device, DeviceName, Event, Memory
from luce.runtime.simulated_file import SimulatedLink, SimulatedMachine, SimulatedWay, read_simulated

# Seconds below which the host does not sleep but look at the clock: the system wakes a thread up that much late.
_BUSY = 1e-3


class Clock(Protocol):
    """The time that simulated work takes."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait_until(self, at: float) -> None:
        """Block this thread until `now` is at least `at`."""


class SystemClock:
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, at: float) -> None:
        left = at - time.perf_counter()
        if left > _BUSY:
            time.sleep(left - _BUSY)
        while time.perf_counter() < at:
            # Other threads run meanwhile.
            time.sleep(0)


SYSTEM_CLOCK = SystemClock()


class SimulatedEvent(Event):
    """Something that happens at a known time."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock = clock
        self.at = at

    def done(self) -> bool:
        return self._clock.now() >= self.at

    def wait(self) -> None:
        self._clock.wait_until(self.at)

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, SimulatedEvent)
        return self.at - start.at


class SimulatedQueue:
    """Work that is done one piece after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: when all work that is queued will be done
        self._empty = 0.0

    def take(self, seconds: float) -> None:
        """Queue work that takes so long."""
        self._empty = max(self._empty, self._clock.now()) + seconds

    def wait_for(self, event: Event) -> None:
        """Let work queued from now on wait for an event; for one of another kind of device the host waits."""
        if isinstance(event, SimulatedEvent):
            self._empty = max(self._empty, event.at)
        else:
            event.wait()

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self._clock, max(self._empty, self._clock.now()))


class SimulatedArray(np.ndarray[Any, Any]):
    """An array in a simulated device's memory, of which nothing is written unless the device computes."""

    #: the device; None for what NumPy has made of arrays of others
    owner: SimulatedDevice | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.owner = getattr(source, "owner", None)


class SimulatedCopies(CopyStream):
    """Copies take the time of the link between the two devices, or of the way between a device and the host. One that
    follows another one at once takes no latency."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._queue = SimulatedQueue(device.clock)
        self._follows = False

    def wait_for(self, event: Event) -> None:
        self._queue.wait_for(event)
        self._follows = False

    def copy(self, target: Array, source: Array) -> None:
        way = self._device.way_to(getattr(target, "owner", None))
        self._queue.take((0.0 if self._follows else way.latency) + target.nbytes / way.bandwidth)
        self._follows = True
        if self._device.computes:
            np.copyto(target, source)

    def record(self, *, timing: bool = False) -> Event:
        self._follows = False
        return self._queue.record()


class SimulatedDevice(Device):
    """A GPU that is not there. `cpu`: computes for it; None if nobody does.

    Uploads and downloads take no time but what a shard takes for them; copy streams do.
    """

    host = False
    lanes = 32
    blas = False
    products: frozenset[str] = frozenset()
    shared_limit = 0

    def __init__(
        self, machine: SimulatedMachine, index: int, cpu: Device | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.name = DeviceName("sim", index)
        self.machine, self.figures = machine, machine.devices[index]
        self.cpu, self.clock = cpu, clock
        self.computes = cpu is not None
        self.packed = cpu is None or cpu.packed
        self.kv_dtype = np.dtype(np.float16) if cpu is None else cpu.kv_dtype
        self.queue = SimulatedQueue(clock)
        self._held = 0

    def way_to(self, other: SimulatedDevice | None) -> SimulatedWay | SimulatedLink:
        """Latency and bandwidth of copies to another device's memory, or between this one's and the host's."""
        direct = None if other is None else self.machine.link(str(self.name), str(other.name))
        return direct or self.figures.way

    def hold(self, size: int) -> Callable[[], None]:
        """Take `size` bytes of the memory. The returned function gives them back. Raises OutOfMemoryError."""
        if size > self.memory().free:
            raise OutOfMemoryError(f"{self.name}: {size} bytes asked, {self.memory().free} bytes free")
        self._held += size
        sizes = [size]

        def give_back() -> None:
            self._held -= sizes.pop() if sizes else 0

        return give_back

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        return self._own(np.empty(shape, dtype))

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        return self._own(np.zeros(shape, dtype))

    def upload(self, array: NDArray[Any]) -> Array:
        return self._own(np.array(array, order="C"))

    def _own(self, array: NDArray[Any]) -> Array:
        own = array.view(SimulatedArray)
        own.owner = self
        return own

    def download(self, array: Array) -> NDArray[Any]:
        self.synchronize()
        return np.array(array)

    def write(self, array: Array, values: NDArray[Any]) -> None:
        array[...] = values

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def record(self, *, timing: bool = False) -> SimulatedEvent:
        return self.queue.record()

    def wait_for(self, event: Event) -> None:
        self.queue.wait_for(event)

    def copy_stream(self) -> CopyStream:
        return SimulatedCopies(self)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def reaches(self, other: Device) -> bool:
        return self.machine.link(str(self.name), str(other.name)) is not None

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        raise DeviceError(f"{self.name} is simulated: it multiplies nothing")

    def synchronize(self) -> None:
        self.record().wait()

    def memory(self) -> Memory:
        return Memory(max(0, self.figures.free - self._held), self.figures.free)

    def describe(self) -> dict[str, str | int]:
        return {"name": self.figures.name, "simulated": str(self.name), "memory": self.figures.free}

    def close(self) -> None:
        if self.cpu is not None:
            self.cpu.close()


def open_simulated(index: int, open_cpu: Callable[[], Device]) -> SimulatedDevice:
    """A device of the file. Raises UsageError for a bad file."""
    machine = read_simulated()
    return SimulatedDevice(machine, index, open_cpu() if machine.devices[index].computes else None)
