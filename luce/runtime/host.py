"""The Device interface on NumPy: the reference for every op, and the device of machines without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import OutOfMemoryError
from luce.runtime.device import Array, CopyStream, Device, DeviceName, Event, Fetched, Memory


class HostEvent(Event):
    """The host works at once, so all earlier work is done."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, HostEvent)
        return self._at - start._at


class HostCopyStream(CopyStream):
    """A stream whose copies run at once."""

    def wait_for(self, event: Event) -> None:
        event.wait()

    def copy(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def record(self, *, timing: bool = False) -> Event:
        return HostEvent()


def host_memory() -> Memory:
    """Free and total bytes of this machine's memory now."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return Memory(int(fields["MemAvailable"].split()[0]) * 1024, total)
    except (OSError, KeyError, ValueError):
        return Memory(page * os.sysconf("SC_AVPHYS_PAGES"), total)


def give_back_memory() -> None:
    """Give memory that this process has freed back to the system.

    The C library keeps what lies below memory in use, and for steps of a CPU up to 256 MiB more (luce.runtime.cpu):
    126 MiB a minute after 311 MB of layers were gone.
    """
    gc.collect()
    # Other C libraries have no malloc_trim.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HostDevice(Device):
    """Host memory and NumPy. `cpu:0`, `cpu:1`, ... are separate devices in the same memory."""

    lanes = 1
    kv_dtype = np.dtype(np.float32)
    host = True
    packed = False
    blas = True
    products: frozenset[str] = frozenset()
    shared_limit = 0

    def __init__(self, index: int = 0) -> None:
        self.name = DeviceName("cpu", index)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        return self._allocate(np.empty, shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        # The system gives memory of zeros page by page, when it is written to: a long context takes what is used of it.
        return self._allocate(np.zeros, shape, dtype)

    def _allocate(self, make: Callable[..., Array], shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        try:
            return make(shape, dtype)
        except MemoryError as error:
            asked = int(np.prod(shape)) * np.dtype(dtype).itemsize
            raise OutOfMemoryError(f"{self.name}: {asked} bytes asked, {self.memory().free} bytes free") from error

    def upload(self, array: NDArray[Any]) -> Array:
        return array

    def download(self, array: Array) -> NDArray[Any]:
        result: NDArray[Any] = array
        return result

    def fetch(self, array: Array, to: NDArray[Any] | None = None) -> Callable[[], NDArray[Any]]:
        found = self.download(array)
        if to is None:
            return Fetched(found, HostEvent())
        to[...] = found
        return Fetched(to, HostEvent())

    def write(self, array: Array, values: NDArray[Any]) -> None:
        array[...] = values

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def record(self, *, timing: bool = False) -> Event:
        return HostEvent()

    def wait_for(self, event: Event) -> None:
        event.wait()

    def copy_stream(self) -> CopyStream:
        return HostCopyStream()

    def pinned(self, size: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = self.empty(size, np.uint8)
        return memory

    def compute(
        self, work: Callable[..., Array], shape: tuple[int, ...], *arrays: Array, dtype: DTypeLike = np.float32
    ) -> Array:
        """work(*arrays), an array of this shape and dtype, as NumPy computes it; as `call_host` in a capture."""
        return work(*arrays)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        if x.dtype == np.int8:
            # Exact, as a float32 would not be, and by BLAS, as int32 would not be.
            np.copyto(out, x.astype(np.float64) @ weight.astype(np.float64).T, casting="unsafe")
            return
        np.matmul(x.astype(np.float32, copy=False), weight.astype(np.float32, copy=False).T, out=out)

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        return host_memory()

    def describe(self) -> dict[str, str | int]:
        return {
            "name": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "numpy": np.__version__,
            "memory": self.memory().total,
        }

    def close(self) -> None:
        pass
