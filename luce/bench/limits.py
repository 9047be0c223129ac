"""The bandwidth and the arithmetic rate of a device: medians of copies and matrix products that run here and now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.matmul import matmul
from luce.ops.weight import RawTensor, upload_weight
from luce.runtime.cores import thread_count
from luce.runtime.cpu import CpuDevice
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

    Copies and products are the vendor's: on GPUs float16 with float32 sums, on the CPU float32. The CPU has as many
    threads as its products have.
    """

    #: bytes per second of a copy; each byte counts twice, as it is read and written
    copy: float
    #: bytes per second of reads on the host; None on a GPU
    read: float | None
    #: operations per second of a matrix product; None without a BLAS library
    matmul: float | None

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a step can read at most: of reads where they are measured, else of copies."""
        return self.read or self.copy


def limits(device: Device) -> Limits:
    """Measure a device. Takes about a second and 1 GiB of its memory."""
    return host_limits(HOST_SIZES) if device.host else _gpu(device, GPU_SIZES)


def _median(seconds: Callable[[], float]) -> float:
    seconds()
    return statistics.median(seconds() for _ in range(_RUNS))


def _wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def packed_rate(device: CpuDevice, rows: int, side: int) -> float:
    """Operations per second of products of `rows` rows with a matrix [side, side] in Q4_K, in compiled code."""
    blocks = np.random.default_rng(1).integers(0, 256, (side, side // 256 * 144), np.uint8)
    # Scales and minimums that are ordinary numbers.
    blocks.reshape(-1, 144)[:, :4] = np.array([0.01, 0.01], np.float16).view(np.uint8)
    weight = upload_weight(device, [RawTensor("blocks", blocks, GGMLQuantizationType.Q4_K, side)])
    x = np.random.default_rng(2).standard_normal((rows, side), np.float32)
    return 2 * rows * side * side / _median(lambda: _wall(lambda: matmul(device, x, weight)))


def host_limits(sizes: Sizes) -> Limits:
    """Measure the CPU."""
    threads = thread_count()
    source = np.ones(sizes.copied_bytes // 4, np.float32)
    parts, copies = np.array_split(source, threads), np.array_split(np.zeros_like(source), threads)
    a, b = (np.random.default_rng(0).random((n, sizes.side), np.float32) for n in (sizes.rows, sizes.side))

    with ThreadPoolExecutor(threads) as pool:
        copied = _median(lambda: _wall(lambda: list(pool.map(np.copyto, copies, parts))))
        read = _median(lambda: _wall(lambda: list(pool.map(np.max, parts))))
    product = _median(lambda: _wall(lambda: a @ b.T))
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
