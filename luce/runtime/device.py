"""The interface of all devices: arrays, weights' memory, copies, events, kernel launches.

`HostDevice` (host.py) implements it on NumPy and is the reference for every op; `GpuDevice` (gpu.py) implements it on
CuPy for CUDA and HIP. Only ops call `launch`; they ask `device.host` whether to run their NumPy reference instead, or,
so that CpuDevice (cpu.py) can capture it, give a HostDevice the reference by `call_host` and `compute`.
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

# A NumPy or CuPy array, as the device makes them. CuPy is optional, so no type can name it.
Array = Any
#: `sim` is for tests (luce.runtime.simulated)
DeviceKind = Literal["cpu", "cuda", "hip", "sim"]


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

    @property
    def simulated(self) -> bool:
        """Whether it names a device that is not there, for tests."""
        return self.kind == "sim"

    @property
    def vendor(self) -> Literal["cuda", "hip"] | None:
        """Whose driver a GPU has; None of a CPU and of a simulated device."""
        return None if self.kind == "cpu" or self.kind == "sim" else self.kind

    def __str__(self) -> str:
        return f"{self.place}{self.kind}:{self.index}"


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory."""

    free: int
    total: int
    #: the part of `free` that this process holds for its next arrays
    cached: int = 0


class Graph(Protocol):
    """Captured work of a device. Its last reference releases it."""

    def launch(self) -> None:
        """Queue the work again: the same kernels on the same addresses, with the values that are there by then.

        Work that was given to `call_host` runs during the call.
        """


class Event(ABC):
    """A point in a device's queue of work: it is done when all work queued before it is done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is done, without waiting. Raises DeviceError if the work before it failed."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until it is done. Raises DeviceError if the work before it failed."""

    @abstractmethod
    def seconds_since(self, start: Event) -> float:
        """Seconds between two events of one device that were recorded with timing and are done."""


class Flag(Event):
    """An event that any process can set: it is done when a counter in pinned memory has reached a value.

    `memory` is uint32 [1]. Values count up and wrap at 2^32; comparisons are cyclic.
    """

    def __init__(self, memory: NDArray[np.uint32], value: int) -> None:
        self.memory = memory
        self.value = value & 0xFFFFFFFF

    def set(self) -> None:
        """Write the value, so that the event is done."""
        self.memory[0] = self.value

    def done(self) -> bool:
        return (int(self.memory[0]) - self.value) & 0xFFFFFFFF < 1 << 31

    def passed(self, value: int) -> bool:
        """Whether the counter has gone past `value`."""
        return (int(self.memory[0]) - value - 1) & 0xFFFFFFFF < 1 << 31

    def wait(self) -> None:
        while not self.done():
            time.sleep(0)

    def seconds_since(self, start: Event) -> float:
        raise DeviceError("a flag records no time")


class CopyStream(ABC):
    """A stream of copies: they run one after another, beside the device's other work."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Let copies queued from now on wait for an event of this or another device."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Queue target = source: equal shapes and dtypes, target C-contiguous, source of contiguous rows (any stride).

        One array is this device's own. The other is this device's too, or in `pinned` memory, or of another device
        that `reaches` names. Both must stay as they are until an event recorded after the copy is done.
        """

    @abstractmethod
    def record(self, *, timing: bool = False) -> Event:
        """An event that is done when the copies queued so far are."""


class Readable(Protocol):
    """Bytes elsewhere, uint8 with a shape; np.asarray reads all of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]: ...

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill a contiguous array with the bytes from `offset` on. Any thread may call it."""


@dataclass(frozen=True)
class Fetched:
    """A copy to host memory that devices write and read while the host goes on. A call waits for it."""

    #: where the values will be
    values: NDArray[Any]
    #: when they are there
    ready: Event

    def __call__(self) -> NDArray[Any]:
        self.ready.wait()
        return self.values


@dataclass(frozen=True)
class TensorMap:
    """Boxes of an array that kernels bring to shared memory by the copy engine (kernels/tensor_map.h), on devices with
    the products WGMMA."""

    #: 16-bit numbers [rows, heads, columns], C-contiguous; whole multiples of 8 columns, from a multiple of 16 bytes on
    array: Array
    #: of a box, at most 256; it has one head, and 64 columns
    rows: int


class Device(ABC):
    """One device. Not thread-safe: one thread drives a device."""

    name: DeviceName
    #: lanes of a warp or wavefront (32 or 64); 1 on the host
    lanes: int
    #: dtype of K and V rows in the page pools
    kv_dtype: np.dtype[Any]
    #: whether ops run their NumPy reference here instead of launching kernels
    host: bool
    #: whether weights stay in their file's types, instead of becoming float32
    packed: bool
    #: whether this stands for devices of another process; its `zeros` returns memory that both processes see
    remote = False
    #: whether it computes; a simulated device only takes the time, and its results are none of the model
    computes = True
    #: whether it waits for flags and sets them without stopping the host
    uses_flags = False
    #: whether its kernels may access pinned memory, by `mapped`
    maps_pinned = False
    #: whether `capture` may be called
    captures = False
    #: whether captured work may call `gemm`
    captures_gemm = True
    #: whether `gemm` can be called: a BLAS library is at hand
    blas: bool
    #: whether `gemm` multiplies int8
    int8_gemm = False
    #: matrix instructions of the hardware that kernels/mma.h uses: F16 and BF16 (tiles of these types), WGMMA (products
    #: of four waves)
    products: frozenset[str]
    #: bytes that are left to others, as --device-margin says; None: a share of what is free
    margin: int | None = None
    #: most bytes of shared memory that a block may have
    shared_limit: int
    #: parts that run blocks side by side
    multiprocessors = 1
    #: whether a row of the step that runs has the same bits in any number of rows above FEW_ROWS (luce.ops.matmul);
    #: else many rows are multiplied in the fastest way
    batch_invariant = False

    @abstractmethod
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """An uninitialised C-contiguous array. Raises OutOfMemoryError with the device, the bytes asked and free."""

    @abstractmethod
    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """A zeroed C-contiguous array."""

    @abstractmethod
    def upload(self, array: NDArray[Any]) -> Array:
        """A device array with the values of a NumPy array (which may be a view of a mapped file).

        Pageable memory is read before this returns; pinned memory may be read until `synchronize`.
        """

    def load(self, array: NDArray[Any] | Readable, to: Array | None = None) -> Array:
        """`upload` for large arrays, which it reads in the background; they must not change until `synchronize`, which
        raises the errors of a Readable.

        `to`, if given, is the array to copy to: C-contiguous, of the same shape and dtype.
        """
        values = np.ascontiguousarray(array)
        if to is None:
            return self.upload(values)
        self.write(to, values)
        return to

    @abstractmethod
    def download(self, array: Array) -> NDArray[Any]:
        """A NumPy array with the values of a device array; waits for the kernels that write it."""

    def fetch(self, array: Array, to: NDArray[Any] | None = None) -> Callable[[], NDArray[Any]]:
        """Queue the copy of an array to the host. The returned function waits for it, and must be called. It is Fetched
        where other devices may read the copy before the host does.

        `to`, if given, is pinned memory of the same shape and dtype to copy to.
        """
        if to is None:
            return lambda: self.download(array)
        to[...] = self.download(array)
        return lambda: to

    def set_flag(self, flag: Flag) -> None:
        """Set a flag once all work queued so far is done. Without `uses_flags` the host waits for that work."""
        self.synchronize()
        flag.set()

    @abstractmethod
    def write(self, array: Array, values: NDArray[Any]) -> None:
        """Copy values into a C-contiguous device array of the same shape and dtype; otherwise as `upload`."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Queue target = source: C-contiguous arrays of this device, of the same shape and dtype."""

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

        `args` are device arrays, None for pointers that the kernel does not dereference, TensorMaps, and NumPy scalars
        of the exact C type. `shared` is dynamic shared memory in bytes. Raises DeviceError naming source and kernel, by
        default as on devices that run no kernels.
        """
        raise DeviceError(f"{self.name} runs no kernels (asked for {kernel} of kernels/{source}.cu)")

    def reserve(self, size: int) -> None:
        """Take the memory of the next arrays, `size` bytes in all, in one piece. Does nothing where it is not free, and
        by default, as on devices whose allocations take no time."""
        return

    def warm_up(self, work: Callable[[], object]) -> None:
        """Compile and load all kernels that `work` launches, side by side, without running them.

        `work` must not wait for results. The default does not call `work`: the first launch loads each kernel.
        """
        return

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        """Capture the work that `work` queues as a graph, without running it; also returns the arrays of `work`.

        `work` may allocate and launch, but not wait, copy, upload or download, and every kernel must have been launched
        before; `call_host` is for the rest. Its arrays live in memory that all graphs of this device share, so they
        hold until the next graph is launched or captured. Arrays that it reads but did not allocate must stay in place
        while the graph is in use. Raises DeviceError if something cannot be captured.
        """
        raise DeviceError(f"{self.name} captures no graphs")

    def call_host(self, work: Callable[..., None], *arrays: Array) -> None:
        """Call work(*arrays) on this thread, between the work queued before and that queued behind.

        `work` may fetch, write and wait. In a capture it is not called now, but on the launching thread each time that
        the graph is launched, between the two parts of it; `warm_up` does not call it.
        """
        work(*arrays)

    @abstractmethod
    def record(self, *, timing: bool = False) -> Event:
        """An event that is done when all work queued so far is."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Let work queued from now on wait for an event of this or another device. The NumPy device waits at once."""

    @abstractmethod
    def copy_stream(self) -> CopyStream:
        """A new stream for copies."""

    @abstractmethod
    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Host memory, uint8 [size], that this device's copy streams use without stopping the host."""

    def staging_buffer(self, size: int) -> NDArray[np.uint8]:
        """Host memory for fast copies to and from the device: pinned, or pageable once the system pins no more."""
        try:
            return self.pinned(size)
        except DeviceError:
            return np.empty(size, np.uint8)

    def reserve_pinned(self, size: int) -> None:  # noqa: B027
        """Begin to pin `size` bytes in the background, beside those in use, for the next `staging_buffer` calls.

        The default does nothing.
        """

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        """Let this device's copy streams use memory allocated elsewhere, without stopping the host.

        Returns a function that undoes it. Raises DeviceError. The default does nothing.
        """
        return lambda: None

    def mapped(self, memory: NDArray[Any]) -> Array:
        """Contiguous pinned memory as an array of this device, on which its kernels work; only with `maps_pinned`."""
        raise DeviceError(f"{self.name} does not map pinned memory")

    def reaches(self, other: Device) -> bool:
        """Whether a copy stream of this device can write to `other`'s memory. The first call may enable peer access."""
        return False

    @abstractmethod
    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """Queue out = x weight^T by a BLAS library: x [n, cols], weight [rows, cols], both float16 or both float32, or
        with `int8_gemm` both int8, cols a multiple of 16.

        out is float32 [n, rows], of float16 also float16, of int8 int32 with exact sums; all rows are contiguous, any
        distance apart, those of int8 a multiple of 16 bytes. Sums of floats are accumulated in float32. The library
        chooses its algorithm by the shape, so a row's last bits may change with n; equal calls give equal bits.
        Captured work may call it only with `captures_gemm`. Raises DeviceError.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work; raises DeviceError if any of it failed."""

    @abstractmethod
    def memory(self) -> Memory:
        """Free and total bytes now."""

    @abstractmethod
    def describe(self) -> dict[str, str | int]:
        """Facts to print: model name, architecture, driver, memory, limits."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; further use is an error. Idempotent."""
