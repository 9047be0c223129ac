"""The CPU with packed weights: HostDevice whose products run in compiled code on weights as they are in the file."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

from luce.cpu_kernels.catalogue import Kernels, kernels
from luce.cpu_kernels.thread_pool import Pool
from luce.runtime.cores import thread_count
from luce.runtime.host import HostDevice

# mallopt's options of glibc, and what a step's arrays stay below.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_FREE, _MOST_OF_HEAP = 1 << 28, 1 << 25


class CpuDevice(HostDevice):
    """Host memory, NumPy and compiled kernels. All such devices of a process share their threads."""

    packed = True

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        _keep_freed_memory()
        self.kernels: Kernels = kernels()
        self.pool: Pool = _pool(thread_count(), self.kernels.scratch, self.kernels.work)

    def describe(self) -> dict[str, str | int]:
        return {**super().describe(), "threads": self.pool.threads}


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
def _pool(threads: int, scratch: int, work: int) -> Pool:
    return Pool(threads, scratch, work)
