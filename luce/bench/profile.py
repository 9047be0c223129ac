"""Figures of a device, measured with Luce's own kernels, which fall short of a vendor's by shares that differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.ops.fp16 import dequantise
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import store_fp16
from luce.ops.norm import rms_norm
from luce.ops.weight import RawTensor, Weight, upload_weight
from luce.runtime.device import Device

# Runs before the timed ones, timed runs, and the fewest of them where they take too long.
_WARM_UPS, _RUNS, _FEWEST = 2, 7, 3
#: figures whose quartiles lie further apart, as a share of the median, are noisy
_NOISY = 0.25
#: bytes of the row of hidden states that goes to the device and back
_ROW = 4 * 5120


@dataclass(frozen=True)
class ProfileSizes:
    """How much is computed for a profile."""

    #: of the matrix in products of few rows; at most 2 % of the free memory
    matrix_bytes: int
    columns: int
    #: features of the matrix in products of more than 16 rows; None: all
    features: int | None
    #: rows of the products
    rows: tuple[int, ...]
    #: the smallest kernels in a row
    launches: int
    #: bytes of the copy
    copied: int
    #: seconds for the runs of one figure, after which the fewest must do
    seconds: float


HOST_PROFILE = ProfileSizes(1 << 28, 4096, 1024, (1, 16, 512, 2048), 256, 1 << 24, 0.25)
GPU_PROFILE = ProfileSizes(1 << 28, 4096, None, (1, 16, 512, 2048), 256, 1 << 24, 0.1)


@dataclass(frozen=True)
class FormatProfile:
    """Products with weights of one type."""

    #: bytes of weights per second in a product of one row, as the device holds them
    read: float
    #: operations per second by the number of rows
    rates: dict[int, float]
    #: float16 bytes per second of unpacking; None where products of many rows read packed weights
    unpack: float | None
    #: the widest distance of quartiles as a share of the median
    spread: float
    noisy: bool


@dataclass(frozen=True)
class DeviceProfile:
    """The figures of a device."""

    device: str
    name: str
    #: seconds since 1970
    measured: float
    #: seconds from queueing the smallest kernel until the host sees that it is done
    step: float
    #: seconds of one of many small kernels in a row
    launch: float
    #: seconds one way, and bytes per second, between the device and pinned host memory
    latency: float
    bandwidth: float
    #: by type of weights, such as Q4_K
    formats: dict[str, FormatProfile] = field(default_factory=dict)


@dataclass(frozen=True)
class _Timed:
    median: float
    spread: float
    cut: bool


def profile_device(device: Device, types: Iterable[GGMLQuantizationType], sizes: ProfileSizes) -> DeviceProfile:
    """Measure a device of this process for weights of these types.

    Medians of 7 runs, of 3 where 7 take too long. Raises DeviceError, and OutOfMemoryError without room for a matrix.
    """
    launch, step = _launch(device, sizes)
    latency, bandwidth = _way(device, sizes)
    formats = {type.name: _format(device, type, sizes) for type in types}
    facts = device.describe()
    return DeviceProfile(str(device.name), str(facts["name"]), time.time(), step, launch, latency, bandwidth, formats)


def _runs(device: Device, work: Callable[[], object], sizes: ProfileSizes) -> _Timed:
    """Seconds of `work` between two events of the device."""

    def once() -> float:
        start = device.record(timing=True)
        work()
        end = device.record(timing=True)
        end.wait()
        return end.seconds_since(start)

    return _repeated(once, sizes)


def _repeated(once: Callable[[], float], sizes: ProfileSizes) -> _Timed:
    for _ in range(_WARM_UPS):
        once()
    found: list[float] = []
    while len(found) < _FEWEST or (len(found) < _RUNS and sum(found) < sizes.seconds):
        found.append(once())
    median = max(statistics.median(found), 1e-9)
    first, _, third = statistics.quantiles(found, n=4)
    return _Timed(median, (third - first) / median, len(found) < _RUNS)


def _format(device: Device, type: GGMLQuantizationType, sizes: ProfileSizes) -> FormatProfile:
    weight = _matrix(device, type, sizes)
    rng = np.random.default_rng(2)
    timed: list[_Timed] = []
    rates: dict[int, float] = {}
    unpack = None
    many = weight if sizes.features is None else weight.cut(range(min(sizes.features, weight.rows)))
    if not device.host:
        unpack = _unpack(device, many, type, sizes, timed)
    read = 0.0
    for rows in sizes.rows:
        own = weight if rows <= 16 else many
        x = device.upload(rng.standard_normal((rows, weight.cols), np.float32))
        result = _runs(device, lambda x=x, own=own: matmul(device, x, own), sizes)  # type: ignore[misc]
        timed.append(result)
        rates[rows] = 2 * rows * own.rows * own.cols / result.median
        if rows == 1:
            read = own.nbytes / result.median
    spread = max(result.spread for result in timed)
    return FormatProfile(read, rates, unpack, spread, spread > _NOISY or any(result.cut for result in timed))


def _matrix(device: Device, type: GGMLQuantizationType, sizes: ProfileSizes) -> Weight:
    elements, size = GGML_QUANT_SIZES[type]
    row_bytes = sizes.columns // elements * size
    room = int(device.memory().free * 0.02)
    rows = max(16, min(sizes.matrix_bytes, room) // row_bytes)
    # No byte is above 63, so that every scale is a finite number in all formats.
    raw = np.random.default_rng(1).integers(0, 64, (rows, row_bytes), np.uint8)
    return upload_weight(device, [RawTensor("profile", raw, type, sizes.columns)])


def _unpack(
    device: Device, weight: Weight, type: GGMLQuantizationType, sizes: ProfileSizes, timed: list[_Timed]
) -> float | None:
    """Bytes per second of unpacking, which stays for the products of many rows."""
    if not device.blas or type in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        return None
    store_fp16(device, weight)
    result = _runs(device, lambda: _unpack_once(device, weight), sizes)
    timed.append(result)
    return 2 * weight.rows * weight.cols / result.median


def _unpack_once(device: Device, weight: Weight) -> None:
    assert weight.fp16 is not None
    for part in weight.parts:
        dequantise(device, part.data, part.type, weight.fp16[part.first : part.first + part.rows])


def _launch(device: Device, sizes: ProfileSizes) -> tuple[float, float]:
    """Seconds of one of many small kernels, and of a step of one kernel on the host's clock."""
    x, scale = device.zeros((1, 64)), device.zeros(64)

    def work(count: int) -> Callable[[], object]:
        def queue() -> tuple[()]:
            for _ in range(count):
                rms_norm(device, x, scale, 1e-6)
            return ()

        queue()
        device.synchronize()
        return device.capture(queue)[0].launch if device.captures else queue

    def step() -> float:
        start = time.perf_counter()
        one()
        device.record().wait()
        return time.perf_counter() - start

    many = _runs(device, work(sizes.launches), sizes)
    # A graph is valid until the next one is captured.
    one = work(1)
    alone = _runs(device, one, sizes)
    launch = max(many.median - alone.median, 0.0) / (sizes.launches - 1)
    return launch, max(_repeated(step, sizes).median - launch, 0.0)


def _way(device: Device, sizes: ProfileSizes) -> tuple[float, float]:
    """Latency and bandwidth of copies between the device and pinned host memory, through which activations pass."""

    stream = device.copy_stream()

    def there_and_back(size: int) -> Callable[[], float]:
        memory, array = device.pinned(size), device.zeros(size, np.uint8)
        memory[...] = 0
        device.synchronize()

        def once() -> float:
            start = time.perf_counter()
            stream.copy(array, memory)
            stream.copy(memory, array)
            stream.record().wait()
            return time.perf_counter() - start

        return once

    latency = _repeated(there_and_back(_ROW), sizes).median / 2
    seconds = _repeated(there_and_back(sizes.copied), sizes).median / 2
    return latency, sizes.copied / max(seconds - latency, 1e-9)
