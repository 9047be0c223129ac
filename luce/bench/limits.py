"""The bandwidth and the arithmetic rate of a device: medians of copies and matrix products that run here and now."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from luce.runtime.device import Device

_RUNS = 5


@dataclass(frozen=True)
class Sizes:
    """The sizes of the copies and the matrix products that measure a device."""

    #: far larger than caches
    copied_bytes: int
    #: the product is [rows, side] by [side, side]: a millisecond or more on the fastest GPUs
    side: int
    rows: int


HOST_SIZES = Sizes(copied_bytes=1 << 29, side=4096, rows=512)
GPU_SIZES = Sizes(copied_bytes=1 << 29, side=8192, rows=4096)


@dataclass(frozen=True)
class Limits:
    """The limits of a device.

    Copies and products are the vendor's: on GPUs float16 with float32 sums, on the CPU float32 on all cores.
    """

    #: bytes per second of a copy; each byte counts twice, as it is read and written
    copy: float
    #: bytes per second of reads on the host; None on a GPU
    read: float | None
    #: operations per second of a matrix product; None without a BLAS library
    matmul: float | None


def limits(device: Device) -> Limits:
    """Measure a device. Takes about a second and 1 GiB of its memory."""
    return host_limits(HOST_SIZES) if device.host else _gpu(device, GPU_SIZES)


def _median(seconds: Callable[[], float]) -> float:
    seconds()
    return statistics.median(seconds() for _ in range(_RUNS))


def host_limits(sizes: Sizes) -> Limits:
    """Measure the CPU."""
    cores = len(os.sched_getaffinity(0))
    source = np.ones(sizes.copied_bytes // 4, np.float32)
    parts, copies = np.array_split(source, cores), np.array_split(np.zeros_like(source), cores)
    a, b = (np.random.default_rng(0).random((n, sizes.side), np.float32) for n in (sizes.rows, sizes.side))

    def wall(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    with ThreadPoolExecutor(cores) as threads:
        copied = _median(lambda: wall(lambda: list(threads.map(np.copyto, copies, parts))))
        read = _median(lambda: wall(lambda: list(threads.map(np.max, parts))))
    product = _median(lambda: wall(lambda: a @ b.T))
    return Limits(2 * sizes.copied_bytes / copied, sizes.copied_bytes / read, 2 * a.size * len(b) / product)


def _gpu(device: Device, sizes: Sizes) -> Limits:
    import cupy

    count = sizes.copied_bytes
    source = device.upload(np.random.default_rng(0).integers(0, 256, count, np.uint8))
    target = device.empty(count, np.uint8)
    stream = cupy.cuda.get_current_stream()

    def elapsed(work: Callable[[], object]) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1000

    copied = _median(lambda: elapsed(lambda: target.data.copy_from_device_async(source.data, count, stream)))
    try:
        a, b = (_halves(device, n, sizes.side) for n in (sizes.rows, sizes.side))
        product = _median(lambda: elapsed(lambda: cupy.matmul(a, b.T)))
    except (ImportError, RuntimeError):
        # CuPy has no BLAS library here.
        return Limits(2 * count / copied, None, None)
    return Limits(2 * count / copied, None, 2 * a.size * len(b) / product)


def _halves(device: Device, rows: int, columns: int) -> Any:
    """Random float16 [rows, columns]."""
    return device.upload(np.random.default_rng(rows).standard_normal((rows, columns), np.float32).astype(np.float16))
