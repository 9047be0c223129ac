"""The device layer's one interface: arrays, weights' memory, copies, kernel launches.

`HostDevice` (host.py) implements it on NumPy and is the reference for every op; `GpuDevice` (gpu.py) on CuPy serves
CUDA and HIP. Ops are the only callers of `launch`; they ask `device.host` whether to run their NumPy reference.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError

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
    """Bytes of a device's memory; `cached` of the free ones are held by this process for its next arrays."""

    free: int
    total: int
    cached: int = 0


class Graph(Protocol):
    """Captured work of a device; released with its last reference."""

    def launch(self) -> None:
        """Queue the work again: the same kernels on the same addresses, reading what is there by then."""


class Event(ABC):
    """A moment in a device's work: when all that was queued before it is done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has, without waiting. Raises DeviceError if the work before it failed."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until it has. Raises DeviceError if the work before it failed."""

    @abstractmethod
    def seconds_since(self, start: Event) -> float:
        """Time between two events of one device that were recorded with timing and have happened."""


class Flag(Event):
    """A moment that somebody else tells, who may be another process: a word of pinned memory reaches a value.

    `memory` is uint32 [1]. Values count up and wrap, as `<=` of their difference does.
    """

    def __init__(self, memory: NDArray[np.uint32], value: int) -> None:
        self.memory = memory
        self.value = value & 0xFFFFFFFF

    def set(self) -> None:
        """Let it happen."""
        self.memory[0] = self.value

    def done(self) -> bool:
        return (int(self.memory[0]) - self.value) & 0xFFFFFFFF < 1 << 31

    def passed(self, value: int) -> bool:
        """Whether a later moment than `value` has been told."""
        return (int(self.memory[0]) - value - 1) & 0xFFFFFFFF < 1 << 31

    def wait(self) -> None:
        while not self.done():
            time.sleep(0)

    def seconds_since(self, start: Event) -> float:
        raise DeviceError("a word has no time")


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
    #: whether it waits for a Flag, and tells one, without stopping the host
    uses_flags = False
    #: whether `capture` may be called, and whether `gemm` may be in what is captured
    captures = False
    captures_gemm = True
    #: whether `gemm` can be called: a BLAS library is at hand
    blas: bool
    #: what of kernels/mma.h it has in hardware: F16 and BF16 (tiles of these types), WGMMA (products of four waves)
    products: frozenset[str]
    #: most bytes of shared memory of a block
    shared_limit: int

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

    def load(self, array: NDArray[Any], to: Array | None = None) -> Array:
        """As `upload`, for large arrays that stay as they are until `synchronize`: they are read in the background.

        `to`, if given, is the array they become: C-contiguous, of the same shape and dtype.
        """
        if to is None:
            return self.upload(array)
        self.write(to, array)
        return to

    @abstractmethod
    def download(self, array: Array) -> NDArray[Any]:
        """A NumPy array with the values of a device array; waits for the kernels that write it."""

    def fetch(self, array: Array, to: NDArray[Any] | None = None) -> Callable[[], NDArray[Any]]:
        """Queue the copy of an array to the host: what is returned waits for it, and must be called.

        `to`, if given, is pinned memory of the same shape and dtype that it goes to.
        """
        if to is None:
            return lambda: self.download(array)
        to[...] = self.download(array)
        return lambda: to

    def set_flag(self, flag: Flag) -> None:
        """Let a flag happen once all work queued so far is done. Without `uses_flags` the host waits for that."""
        self.synchronize()
        flag.set()

    @abstractmethod
    def write(self, array: Array, values: NDArray[Any]) -> None:
        """Copy values into a C-contiguous device array of the same shape and dtype; as `upload` but for the place."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Queue target = source: C-contiguous arrays of this device, of the same shape and dtype."""

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

        `args` are device arrays, None for pointers that are not followed, and NumPy scalars of the exact C type.
        `shared` is dynamic shared memory in bytes.
        Raises DeviceError naming source and kernel.
        """

    def warm_up(self, work: Callable[[], object]) -> None:
        """Make all kernels that `work` launches ready, side by side, without running them; `work` waits for nothing.

        By default `work` is not even called: kernels are made ready as they are launched.
        """
        return

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        """What `work` queues, as a graph, without running it, and the arrays it returns.

        Work may allocate and launch, but not wait, copy, upload or download; all that it launches has been launched
        before. Its arrays live in memory that all graphs of this device share, so they hold until the next graph is
        launched or captured. What it reads and did not allocate must stay in place as long as the graph is used. Raises
        DeviceError if something in it cannot be captured.
        """
        raise DeviceError(f"{self.name} captures no graphs")

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

    def staging_buffer(self, size: int) -> NDArray[np.uint8]:
        """Host memory that copies to and from the device are fastest with: pinned, as long as the system pins more."""
        try:
            return self.pinned(size)
        except DeviceError:
            return np.empty(size, np.uint8)

    def reserve_pinned(self, size: int) -> None:  # noqa: B027
        """So many bytes of `landing` may be asked for soon, beside what is in use: where they take long to make, that
        begins now, behind the scenes. By default there is nothing to do."""

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        """Let this device's copy streams reach memory that somebody else made, without stopping the host.

        Returns what undoes it. Raises DeviceError. By default there is nothing to do.
        """
        return lambda: None

    def reaches(self, other: Device) -> bool:
        """Whether a copy stream of this device can write to `other`'s memory. May open the way the first time."""
        return False

    @abstractmethod
    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """Queue out = x weight^T by a BLAS library: x [n, cols], weight [rows, cols], both float16 or both float32.

        out is float32 [n, rows]; all rows are contiguous, any distance apart. Sums are accumulated in float32. The
        library chooses its algorithm by the shape, so a row's last bits may change with n; equal calls give equal bits.
        Not while a graph is captured. Raises DeviceError.
        """

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
