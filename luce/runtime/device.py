"""The device layer's one interface: arrays, weights' memory, copies, kernel launches.

`HostDevice` (host.py) implements it on NumPy and is the reference for every op; `GpuDevice` (gpu.py) on CuPy serves
CUDA and HIP. Ops are the only callers of `launch`; they ask `device.host` whether to run their NumPy reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

# A NumPy or CuPy array; which one is the device's business. CuPy is optional, so it cannot be named in a type.
Array = Any
DeviceKind = Literal["cpu", "cuda", "hip"]


@dataclass(frozen=True)
class DeviceName:
    """`backend:index`, for example `cuda:0`."""

    kind: DeviceKind
    index: int
    #: `tcp://host:port/` for a device of another machine
    place: str = ""

    @property
    def local(self) -> DeviceName:
        """The device as its own machine names it."""
        return DeviceName(self.kind, self.index)

    def __str__(self) -> str:
        return f"{self.place}{self.kind}:{self.index}"


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory."""

    free: int
    total: int


class Event(ABC):
    """A moment in a device's work: when all that was queued before it is done."""

    @abstractmethod
    def happened(self) -> bool:
        """Whether it has, without waiting. Raises DeviceError if the work before it failed."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until it has. Raises DeviceError if the work before it failed."""

    @abstractmethod
    def seconds_since(self, start: Event) -> float:
        """Time between two events of one device that were recorded with timing and have happened."""


class CopyStream(ABC):
    """Copies of a device that go on beside its other work, one after another."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Let copies queued from now on wait for an event, which may be another device's."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Queue target = source: equal shapes and dtypes, target C-contiguous, source of contiguous rows (any stride).

        One of them is the device's own; the other too, or in `pinned` memory, or another device's that `reaches` names.
        Both must stay as they are until an event recorded after the copy.
        """

    @abstractmethod
    def record(self, *, timing: bool = False) -> Event:
        """The moment when the copies queued so far are done."""


class Device(ABC):
    """One device. Not thread-safe: one thread drives a device."""

    name: DeviceName
    #: lanes of a warp or wavefront (32 or 64); 1 on the host
    lanes: int
    #: dtype of K and V rows in the page pools
    kv_dtype: np.dtype[Any]
    #: whether ops run their NumPy reference here instead of launching kernels
    host: bool
    #: whether this stands for devices of another process: `zeros` here is memory that both processes see
    shared = False

    @abstractmethod
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """An uninitialised C-contiguous array. Raises OutOfMemoryError naming device, bytes asked and bytes free."""

    @abstractmethod
    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """A zeroed C-contiguous array."""

    @abstractmethod
    def upload(self, array: NDArray[Any]) -> Array:
        """A device array with the values of a NumPy array (which may be a view of a mapped file).

        Pageable memory is read before this returns; pinned memory may be read until `synchronize`.
        """

    @abstractmethod
    def download(self, array: Array) -> NDArray[Any]:
        """A NumPy array with the values of a device array; waits for the kernels that write it."""

    @abstractmethod
    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        defines: Mapping[str, int | str] | None = None,
        shared: int = 0,
    ) -> None:
        """Queue `kernel` of `kernels/<source>.cu`, compiled with `-DNAME=VALUE` for each define.

        `args` are device arrays and NumPy scalars of the exact C type. `shared` is dynamic shared memory in bytes.
        Raises DeviceError naming source and kernel.
        """

    @abstractmethod
    def record(self, *, timing: bool = False) -> Event:
        """The moment when all work queued so far is done."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Let work queued from now on wait for an event, which may be another device's. The host itself waits."""

    @abstractmethod
    def copy_stream(self) -> CopyStream:
        """A new stream for copies."""

    @abstractmethod
    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Host memory that this device's copy streams reach without stopping the host: uint8 [size]."""

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        """Let this device's copy streams reach memory that somebody else made, without stopping the host.

        Returns what undoes it. Raises DeviceError. By default there is nothing to do.
        """
        return lambda: None

    def reaches(self, other: Device) -> bool:
        """Whether a copy stream of this device can write to `other`'s memory. May open the way the first time."""
        return False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work; raises DeviceError if any of it failed."""

    @abstractmethod
    def memory(self) -> Memory:
        """Free and total bytes now."""

    @abstractmethod
    def describe(self) -> dict[str, str | int]:
        """Facts for people: model name, architecture, driver, memory, limits."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; further use is an error. Idempotent."""
