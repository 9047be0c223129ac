"""The limits of a device: medians of copies, reads and matrix products that run here and now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.matmul import matmul
from luce.ops.weight import RawTensor, upload_weight
from luce.runtime.cores import thread_count
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device

_RUNS = 5
# Threads of a block of kernels/read.cu, and blocks: as many for each of 132 multiprocessors as one holds.
_READ_THREADS, _READ_BLOCKS = 256, 8 * 132


@dataclass(frozen=True)
class Sizes:
    """The sizes of the copies, the reads and the matrix products that measure a device."""

    #: of a copy, far larger than caches; as many are read as a copy reads and writes
    copied_bytes: int
    #: the product is [rows, side] by [side, side]: a millisecond or more on the fastest GPUs with 4096 rows
    side: int


HOST_SIZES = Sizes(copied_bytes=1 << 29, side=4096)
GPU_SIZES = Sizes(copied_bytes=1 << 29, side=8192)


@dataclass(frozen=True)
class Limits:
    """The limits of a device, by what work does: steps of few rows read memory, prompts multiply.

    Copies and products are the vendor's: on GPUs float16 with float32 sums, on the CPU float32. The CPU has as many
    threads as its products have.
    """

    #: bytes per second of a copy; each byte counts twice, as it is read and written
    copy: float
    #: bytes per second of reads that write nothing
    read: float
    #: operations per second of matrix products, by their number of rows; empty without a BLAS library
    products: Mapping[int, float]


def limits(device: Device, rows: Sequence[int]) -> Limits:
    """Measure a device, and its products of so many rows. Takes about a second and 1 GiB of its memory."""
    return host_limits(HOST_SIZES, rows) if device.host else _gpu(device, GPU_SIZES, rows)


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


def host_limits(sizes: Sizes, rows: Sequence[int]) -> Limits:
    """Measure the CPU."""
    threads = thread_count()
    source = np.ones(sizes.copied_bytes // 4, np.float32)
    parts, copies = np.array_split(source, threads), np.array_split(np.zeros_like(source), threads)
    side = sizes.side
    a, b = (np.random.default_rng(0).random((n, side), np.float32) for n in (max(rows, default=1), side))

    with ThreadPoolExecutor(threads) as pool:
        copied = _median(lambda: _wall(lambda: list(pool.map(np.copyto, copies, parts))))
        read = _median(lambda: _wall(lambda: list(pool.map(np.max, parts))))
    products = {n: 2 * n * side * side / _median(partial(_wall, partial(np.matmul, a[:n], b.T))) for n in rows}
    return Limits(2 * sizes.copied_bytes / copied, sizes.copied_bytes / read, products)


def _gpu(device: Device, sizes: Sizes, rows: Sequence[int]) -> Limits:
    import cupy

    half, side = sizes.copied_bytes, sizes.side
    whole = device.empty(2 * half, np.uint8)
    device.write(whole[:half], np.random.default_rng(0).integers(0, 256, half, np.uint8))
    found = device.empty(_READ_BLOCKS * _READ_THREADS, np.uint32)
    stream = cupy.cuda.get_current_stream()

    def elapsed(work: Callable[[], object]) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1000

    copied = _median(lambda: elapsed(lambda: device.copy(whole[half:], whole[:half])))
    read = _median(lambda: elapsed(lambda: read_all(device, whole, found)))
    try:
        a, b = (_halves(device, n, side) for n in (max(rows, default=1), side))
        products = {n: 2 * n * side * side / _median(partial(elapsed, partial(cupy.matmul, a[:n], b.T))) for n in rows}
    except (ImportError, RuntimeError):
        # CuPy has no BLAS library here.
        products = {}
    return Limits(2 * half / copied, 2 * half / read, products)


def read_all(device: Device, data: Array, found: Array) -> None:
    """Read `data`, uint8 in multiples of 16 bytes on a GPU, by a thread for each word of `found`, a multiple of 256.

    The exclusive or of these words becomes that of the words of `data`.
    """
    grid = (len(found) // _READ_THREADS,)
    device.launch("read", "read_words", grid, (_READ_THREADS,), (data, np.int64(data.nbytes // 16), found))


def _halves(device: Device, rows: int, columns: int) -> Any:
    """Random float16 [rows, columns]."""
    return device.upload(np.random.default_rng(rows).standard_normal((rows, columns), np.float32).astype(np.float16))
