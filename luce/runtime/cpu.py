"""The CPU with packed weights: HostDevice whose products run in compiled code on weights as they are in the file."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from luce.runtime.cores import thread_count
from luce.runtime.host import HostDevice

if TYPE_CHECKING:
    from luce.cpu_kernels.catalogue import Kernels
    from luce.cpu_kernels.thread_pool import Pool


class CpuDevice(HostDevice):
    """Host memory, NumPy and compiled kernels. All such devices of a process share their threads."""

    packed = True

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        from luce.cpu_kernels.catalogue import kernels

        self.kernels: Kernels = kernels()
        self.pool: Pool = _pool(thread_count(), self.kernels.scratch)

    def describe(self) -> dict[str, str | int]:
        return {**super().describe(), "threads": self.pool.threads}


@cache
def _pool(threads: int, scratch: int) -> Pool:
    from luce.cpu_kernels.thread_pool import Pool

    return Pool(threads, scratch)
