"""What a device reaches when nothing but its memory or its arithmetic limits it. Medians, measured on the spot."""

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

# Far larger than caches; enough operations for a millisecond on the fastest GPUs.
_COPIED = 1 << 29
_SIDE = {"gpu": 8192, "cpu": 4096}
_ROWS = {"gpu": 4096, "cpu": 512}
_RUNS = 5


@dataclass(frozen=True)
class Limits:
    """`copy`, `read`: bytes a second, a copy's counted as read and written; `matmul`: operations a second.

    Copies and products are the vendor's: float16 with float32 sums on GPUs, float32 by all cores on the CPU. None where
    the device offers no such thing.
    """

    copy: float
    read: float | None
    matmul: float | None


def limits(device: Device) -> Limits:
    """Measure a device; takes about a second and 1 GiB of its memory."""
    return _host() if device.host else _gpu(device)


def _median(seconds: Callable[[], float]) -> float:
    seconds()
    return statistics.median(seconds() for _ in range(_RUNS))


def _host() -> Limits:
    cores = len(os.sched_getaffinity(0))
    source = np.ones(_COPIED // 4, np.float32)
    parts, copies = np.array_split(source, cores), np.array_split(np.zeros_like(source), cores)
    a, b = (np.random.default_rng(0).random((n, _SIDE["cpu"]), np.float32) for n in (_ROWS["cpu"], _SIDE["cpu"]))

    def wall(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    with ThreadPoolExecutor(cores) as pool:
        copied = _median(lambda: wall(lambda: list(pool.map(np.copyto, copies, parts))))
        read = _median(lambda: wall(lambda: list(pool.map(np.max, parts))))
    product = _median(lambda: wall(lambda: a @ b.T))
    return Limits(2 * _COPIED / copied, _COPIED / read, 2 * a.size * len(b) / product)


def _gpu(device: Device) -> Limits:
    import cupy

    source = device.upload(np.random.default_rng(0).integers(0, 256, _COPIED, np.uint8))
    target = device.empty(_COPIED, np.uint8)
    stream = cupy.cuda.get_current_stream()

    def elapsed(work: Callable[[], object]) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1000

    copied = _median(lambda: elapsed(lambda: target.data.copy_from_device_async(source.data, _COPIED, stream)))
    try:
        a, b = (_halves(device, n) for n in (_ROWS["gpu"], _SIDE["gpu"]))
        product = _median(lambda: elapsed(lambda: cupy.matmul(a, b.T)))
    except (ImportError, RuntimeError):
        # CuPy without a BLAS library.
        return Limits(2 * _COPIED / copied, None, None)
    return Limits(2 * _COPIED / copied, None, 2 * a.size * len(b) / product)


def _halves(device: Device, rows: int) -> Any:
    return device.upload(
        np.random.default_rng(rows).standard_normal((rows, _SIDE["gpu"]), np.float32).astype(np.float16)
    )
