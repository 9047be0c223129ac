"""The CPU with packed weights: HostDevice whose products run in compiled code on weights as they are in the file."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.cpu_kernels.catalogue import Kernels, kernels
from luce.cpu_kernels.machine_code import PythonFunction
from luce.cpu_kernels.thread_pool import Job, Pool
from luce.errors import DeviceError
from luce.runtime.cores import thread_count
from luce.runtime.cpu_graph import Arena, CpuGraph
from luce.runtime.device import Array, Graph
from luce.runtime.host import HostDevice

# mallopt's options of glibc, and what a step's arrays stay below.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_FREE, _MOST_OF_HEAP = 1 << 28, 1 << 25


class CpuDevice(HostDevice):
    """Host memory, NumPy and compiled kernels. All such devices of a process share their threads.

    A capture takes calls of compiled kernels, and NumPy's work that `compute` and `call_host` name. An op that asks
    whether it runs on the host would compute with NumPy by itself, so it fails there.
    """

    packed = True
    captures = True
    captures_gemm = False

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        _keep_freed_memory()
        self.kernels: Kernels = kernels()
        self.pool: Pool = _pool(thread_count(), self.kernels)
        self._arena = Arena()
        self._capture: tuple[int, CpuGraph] | None = None

    @property
    def host(self) -> bool:  # type: ignore[override]  # constant but in a capture
        self._refuse("NumPy")
        return True

    @property
    def _graph(self) -> CpuGraph | None:
        """That of this thread's capture."""
        capture = self._capture
        return capture[1] if capture is not None and capture[0] == threading.get_ident() else None

    def _refuse(self, what: str) -> None:
        if self._graph is not None:
            raise DeviceError(f"{self.name}: a step with work of {what} is not captured")

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        graph = CpuGraph(self.pool, self._arena)
        self._arena.begin()
        self._capture = threading.get_ident(), graph
        try:
            arrays = work()
        finally:
            self._capture = None
        graph.finish()
        return graph, tuple(map(self._arena.borrowed, arrays))

    def run(self, job: Job, *arguments: Any) -> None:
        """Call the function of a job, or let a capture do so."""
        if graph := self._graph:
            graph.add_job(job, arguments)
        else:
            self.pool.call(job, *arguments)

    def call(self, function: PythonFunction, *arguments: Any) -> None:
        """Call another compiled function, or let a capture do so."""
        if graph := self._graph:
            graph.add_call(function, arguments)
        else:
            function(*arguments)

    def call_host(self, work: Callable[..., None], *arrays: Array) -> None:
        if graph := self._graph:
            graph.add_work(work, arrays)
        else:
            work(*arrays)

    def compute(
        self, work: Callable[..., Array], shape: tuple[int, ...], *arrays: Array, dtype: DTypeLike = np.float32
    ) -> Array:
        if self._graph is None:
            return work(*arrays)
        out = self.empty(shape, dtype)
        self.call_host(partial(_write_result, work), out, *arrays)
        return out

    def copy(self, target: Array, source: Array) -> None:
        self.call_host(np.copyto, target, source)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        if self._graph is None:
            return super().zeros(shape, dtype)
        out = self.empty(shape, dtype)
        self.call_host(_clear, out)
        return out

    def _allocate(self, make: Callable[..., Array], shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        return super()._allocate(make if self._graph is None else self._arena.empty, shape, dtype)

    def upload(self, array: NDArray[Any]) -> Array:
        self._refuse("uploads")
        return super().upload(array)

    def write(self, array: Array, values: NDArray[Any]) -> None:
        self._refuse("uploads")
        super().write(array, values)

    def download(self, array: Array) -> NDArray[Any]:
        self._refuse("downloads")
        # The next launch overwrites results of a graph.
        return super().download(array.copy() if self._arena.lends(array) else array)

    def describe(self) -> dict[str, str | int]:
        return {**super().describe(), "threads": self.pool.threads}


def _write_result(work: Callable[..., Array], out: Array, *arrays: Array) -> None:
    out[...] = work(*arrays)


def _clear(array: Array) -> None:
    array[...] = 0


@cache
def _keep_freed_memory() -> None:
    """Let a step's arrays take the memory of the step before: given back to the system, each page faults again.

    A prompt of 128 tokens of SmolLM2 faulted 14,000 times, 30 of its 255 ms (one thread of an AMD EPYC).
    """
    # Other C libraries have no mallopt.
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _MOST_OF_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_FREE)


@cache
def _pool(threads: int, kernels: Kernels) -> Pool:
    return Pool(threads, kernels.scratch, kernels.work, kernels.replay)
