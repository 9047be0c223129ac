"""Measures the figures of a device in bounded time: medians of products, launches and copies."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from luce.ops.fp16 import dequantise
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import store_copy
from luce.ops.moe import Routing, expert_matmul, group
from luce.ops.weight import RawTensor, Weight, upload_experts, upload_weight
from luce.profiles.layer_parts import (
    Part,
    attention_part,
    elementwise_part,
    recurrence_part,
    routing_part,
    small_kernel,
)
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Array, Device

# Runs before the timed ones, timed runs, and the fewest of them where they take too long.
_WARM_UPS, _RUNS, _FEWEST = 2, 7, 3
#: figures whose quartiles lie further apart, as a share of the median, are noisy
_NOISY = 0.25
#: bytes of the row of hidden states that goes to the device and back
_ROW = 4 * 5120
#: columns of matrices, and random bytes that matrices repeat: to make all of them takes longer than to measure them
_COLUMNS, _RANDOM = 4096, 1 << 20
#: share of a figure's time that one run may take
_SHARE = 0.2
#: fewest features of a matrix: with fewer ones a GPU has blocks without work
_LEAST_FEATURES = 1024
#: features of the matrices with which kernels are compiled
_FEW_FEATURES = 256
#: features are a multiple of it, as in models: with an odd number the vendor's library takes four times as long (H100,
#: 2048 rows: 145 instead of 556 TFLOP/s)
_TILE = 16


@dataclass(frozen=True)
class ExpertSizes:
    """The routed experts whose products are measured."""

    count: int = 64
    #: that each row chooses
    used: int = 8
    #: of the matrix of one expert
    bytes: int = 1 << 21
    #: rows of the products
    rows: tuple[int, ...] = (1, 16, 512)


@dataclass(frozen=True)
class ProfileSizes:
    """How much is computed for a profile."""

    #: of the matrix in products of few rows; at most 2 % of the free memory
    matrix_bytes: int = 1 << 28
    columns: int = _COLUMNS
    #: fewest features of a matrix whose products take too long with all of them
    features: int = _LEAST_FEATURES
    #: rows of the products
    rows: tuple[int, ...] = (1, 16, 512, 2048)
    #: the smallest kernels in a row
    launches: int = 256
    #: bytes of the copy
    copied: int = 1 << 24
    #: seconds for the runs of one figure, after which the fewest must do
    seconds: float = 0.1
    #: keys and values that a row of attention sees
    positions: int = 8192
    #: rows of a prompt in attention and recurrent layers
    prompt: int = 2048
    experts: ExpertSizes = ExpertSizes()


HOST_PROFILE = ProfileSizes(seconds=0.25, prompt=512, experts=ExpertSizes(rows=(1, 16, 128)))
GPU_PROFILE = ProfileSizes()


@dataclass(frozen=True)
class Measuring:
    """How a device is measured."""

    sizes: ProfileSizes
    #: whether products with routed experts are measured
    experts: bool = False
    #: whether gated DeltaNet is measured
    recurrent: bool = False
    #: when it is to end (time.monotonic); figures after that get the fewest runs
    end: float = math.inf
    #: gets what is measured next
    on_figure: Callable[[str], None] = lambda figure: None


@dataclass(frozen=True)
class _Timed:
    median: float
    spread: float
    cut: bool

    @property
    def noisy(self) -> bool:
        return self.cut or self.spread > _NOISY


def profile_device(device: Device, types: Iterable[GGMLQuantizationType], how: Measuring) -> DeviceProfile:
    """Measure a device of this process for weights of these types.

    Medians of 7 runs, of 3 where 7 take too long or the time is over. A matrix whose products take too long is cut, so
    a profile of three types takes 2 s on a GPU and 4 s on a CPU, and a few more on a slow one, with compiled kernels.
    Raises DeviceError, and OutOfMemoryError without room for a matrix.
    """
    timer = _Timer(device, how)
    products = {type.name: _Products(timer, type) for type in types}
    timer.tell("kernels")
    parts = _parts(timer)
    device.warm_up(lambda: _launch_all(timer, list(products.values()), list(parts.values())))
    timer.tell("launches")
    launch, step = _launch(timer)
    timer.tell("copies")
    way = _host_link(timer)
    timer.tell("attention")
    rates = {name: part.amount / timer.runs(part.run).median for name, part in parts.items()}
    # Their arrays make room for the matrices.
    parts.clear()
    routing = _routing(timer) if how.experts and device.host else 0.0
    formats = {name: product.profile() for name, product in products.items()}
    name = str(device.describe()["name"])
    return DeviceProfile(
        str(device.name),
        name,
        time.time(),
        step,
        launch,
        way,
        formats,
        state_read=rates["state_read"],
        attention=rates["attention"],
        elementwise=rates["elementwise"],
        recurrence=rates.get("recurrence"),
        routing=routing,
    )


def _launch_all(timer: _Timer, products: Sequence[_Products], parts: Sequence[Part]) -> None:
    """Launch all kernels, for `Device.warm_up`."""
    for part in (small_kernel(timer.device), *parts):
        part.run()
    for product in products:
        product.launch()


def _parts(timer: _Timer) -> dict[str, Part]:
    """What a layer computes beside its products, by the figure that it gives."""
    device, sizes, how = timer.device, timer.sizes, timer.how
    parts = {
        "state_read": attention_part(device, 1, sizes.positions),
        "attention": attention_part(device, sizes.prompt, sizes.prompt),
        "elementwise": elementwise_part(device, sizes.prompt),
    }
    if how.recurrent:
        parts["recurrence"] = recurrence_part(device, sizes.prompt)
    return parts


def _routing(timer: _Timer) -> float:
    """Seconds of choosing a row's experts and adding their results."""
    sizes = timer.sizes.experts
    return timer.runs(routing_part(timer.device, sizes.count, sizes.used).run).median


class _Timer:
    """Times work on a device."""

    def __init__(self, device: Device, how: Measuring) -> None:
        self.device, self.how, self.sizes = device, how, how.sizes

    def tell(self, figure: str) -> None:
        self.how.on_figure(f"{self.device.name}: {figure}")

    def runs(self, work: Callable[[], object]) -> _Timed:
        """Seconds of `work` between two events of the device."""
        return self.repeated(lambda: self.once(work))

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of `work`; on a GPU behind the same work, untimed: it computes while Python queues what is timed."""
        if not self.device.host:
            work()
        start = self.device.record(timing=True)
        work()
        end = self.device.record(timing=True)
        end.wait()
        return end.seconds_since(start)

    def repeated(self, once: Callable[[], float]) -> _Timed:
        for _ in range(_WARM_UPS):
            once()
        found: list[float] = []
        while len(found) < _FEWEST or (len(found) < _RUNS and sum(found) < self._seconds()):
            found.append(once())
        median = max(statistics.median(found), 1e-9)
        first, _, third = statistics.quantiles(found, n=4)
        return _Timed(median, (third - first) / median, len(found) < _RUNS)

    def _seconds(self) -> float:
        return self.sizes.seconds if time.monotonic() < self.how.end else 0.0

    def most(self, count: int, work: Callable[[int], object], *, start: int) -> int:
        """The most of `count` with which a run of `work` is short enough: `start`, and more as long as a run has shown
        that there is time for it. So no run takes a thousand times too long."""
        limit, at = self.sizes.seconds * _SHARE, min(start, count)
        work(at)
        while at < count:
            room = limit / max(self.once(lambda at=at: work(at)), 1e-9)  # type: ignore[misc]
            if room < 2:
                break
            at = min(count, int(at * min(room, 16)))
        return at


class _Products:
    """Products with weights of one type."""

    def __init__(self, timer: _Timer, type: GGMLQuantizationType) -> None:
        self._timer, self._device, self._sizes, self._type = timer, timer.device, timer.sizes, type
        self._timed: list[_Timed] = []

    def profile(self) -> FormatProfile:
        timer, name = self._timer, self._type.name
        weight = self._matrix()
        unpack = None
        read, rates = 0.0, dict[int, float]()
        for rows in self._sizes.rows:
            if rows > 16 and self._unpacks and unpack is None:
                timer.tell(f"{name}, unpacking")
                unpack = self._unpack(weight)
            timer.tell(f"{name}, {rows} row{'s' if rows > 1 else ''}")
            x = self._rows(rows, weight.cols)
            own = self._cut(weight, x)
            result = timer.runs(lambda x=x, own=own: matmul(self._device, x, own))  # type: ignore[misc]
            self._timed.append(result)
            rates[rows] = 2 * rows * own.rows * own.cols / result.median
            if rows == 1:
                read = own.nbytes / result.median
        gather = {}
        if timer.how.experts:
            timer.tell(f"{name}, experts")
            del weight
            gather = self._gather(read, rates)
        spread = max(result.spread for result in self._timed)
        return FormatProfile(read, rates, unpack, spread, any(result.noisy for result in self._timed), gather)

    def launch(self) -> None:
        """Launch the kernels of all products, with a matrix of few features."""
        weight = self._matrix(_FEW_FEATURES)
        for rows in self._sizes.rows:
            matmul(self._device, self._rows(rows, weight.cols), weight)
        if self._unpacks:
            store_copy(self._device, weight)
        if self._timer.how.experts:
            experts = self._experts(16)
            for rows in self._sizes.experts.rows:
                self._expert_product(experts, rows)()

    def _rows(self, rows: int, columns: int) -> Array:
        return self._device.upload(np.random.default_rng(2).standard_normal((rows, columns), np.float32))

    def _cut(self, weight: Weight, x: Array) -> Weight:
        """The matrix, or its first features where products with all of them take too long."""
        least = min(self._sizes.features, weight.rows)

        def work(features: int) -> None:
            matmul(self._device, x, weight.cut(range(features)))

        count = self._timer.most(weight.rows, work, start=least)
        if count == weight.rows:
            return weight
        count = _whole_tiles(count)
        own = weight.cut(range(count))
        own.copy = None if weight.copy is None else weight.copy[:count]
        return own

    def _raw(self, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        # No byte is above 63, so that every scale is a finite number in all formats.
        random = np.random.default_rng(1).integers(0, 64, max(row_bytes, min(_RANDOM, rows * row_bytes)), np.uint8)
        return np.resize(random, (rows, row_bytes))

    def _row_bytes(self) -> int:
        elements, size = GGML_QUANT_SIZES[self._type]
        return self._sizes.columns // int(elements) * int(size)

    def _matrix(self, most: int | None = None) -> Weight:
        row_bytes, room = self._row_bytes(), int(self._device.memory().free * 0.02)
        rows = _whole_tiles(min(self._sizes.matrix_bytes, room) // row_bytes)
        rows = rows if most is None else min(most, rows)
        raw = self._raw(rows, row_bytes)
        return upload_weight(self._device, [RawTensor("profile", raw, self._type, self._sizes.columns)])

    @property
    def _unpacks(self) -> bool:
        """Whether products of many rows read unpacked weights."""
        return (
            not self._device.host
            and self._device.blas
            and self._type not in (GGMLQuantizationType.F16, GGMLQuantizationType.F32)
        )

    def _unpack(self, weight: Weight) -> float:
        """Bytes per second of unpacking, which stays for the products of many rows."""
        device = self._device
        store_copy(device, weight)
        fp16 = weight.copy
        assert fp16 is not None

        def work() -> None:
            for part in weight.parts:
                dequantise(device, part.data, part.type, fp16[part.first : part.first + part.rows])

        result = self._timer.runs(work)
        self._timed.append(result)
        return 2 * weight.rows * weight.cols / result.median

    def _gather(self, read: float, rates: dict[int, float]) -> dict[int, float]:
        """The share of the speed of a matrix that experts reach, by rows; their time is that of the bytes they touch or
        of the arithmetic (layer_time.py of the planner)."""
        sizes = self._sizes.experts
        weight = self._experts(_whole_tiles(sizes.bytes // self._row_bytes()))
        found = {}
        for rows in sizes.rows:
            result = self._timer.runs(self._expert_product(weight, rows))
            self._timed.append(result)
            touched = 1 - (1 - sizes.used / sizes.count) ** rows
            rate = rates[max(count for count in rates if count <= rows)]
            operations = 2 * rows * sizes.used * (weight.rows // sizes.count) * weight.cols
            found[rows] = min(1.0, max(touched * weight.nbytes / read, operations / rate) / result.median)
        return found

    def _experts(self, features: int) -> Weight:
        count = self._sizes.experts.count
        raw = self._raw(count * features, self._row_bytes())
        return upload_experts(self._device, [RawTensor("experts", raw, self._type, self._sizes.columns)], count)

    def _expert_product(self, weight: Weight, rows: int) -> Callable[[], object]:
        device, sizes, rng = self._device, self._sizes.experts, np.random.default_rng(3)
        chosen = np.stack([rng.permutation(sizes.count)[: sizes.used] for _ in range(rows)]).astype(np.int32)
        ids, x = device.upload(chosen), self._rows(rows, weight.cols)
        weights = device.upload(np.full(chosen.shape, 1 / sizes.used, np.float32))
        routing = Routing(ids, weights, group(device, ids, sizes.count))
        return lambda: expert_matmul(device, x, weight, sizes.count, routing)


def _whole_tiles(features: int) -> int:
    return max(features // _TILE, 1) * _TILE


def _launch(timer: _Timer) -> tuple[float, float]:
    """Seconds of one of many small kernels, and of a step of one kernel on the host's clock."""
    device, launches = timer.device, timer.sizes.launches
    kernel = small_kernel(device).run

    def work(count: int) -> Callable[[], object]:
        def queue() -> tuple[()]:
            for _ in range(count):
                kernel()
            return ()

        queue()
        device.synchronize()
        return device.capture(queue)[0].launch if device.captures else queue

    def step() -> float:
        start = time.perf_counter()
        one()
        device.record().wait()
        return time.perf_counter() - start

    many = timer.runs(work(launches))
    # A graph is valid until the next one is captured.
    one = work(1)
    alone = timer.runs(one)
    launch = max(many.median - alone.median, 0.0) / (launches - 1)
    return launch, max(timer.repeated(step).median - launch, 0.0)


def _host_link(timer: _Timer) -> LinkProfile:
    """Copies between the device and pinned host memory, through which activations pass."""
    device, stream = timer.device, timer.device.copy_stream()

    def there_and_back(size: int) -> Callable[[], float]:
        memory, array = device.pinned(size), device.zeros(size, np.uint8)
        memory[...] = 0
        device.synchronize()

        def once() -> float:
            start = time.perf_counter()
            stream.copy(array, memory)
            stream.copy(memory, array)
            stream.record().wait()
            return (time.perf_counter() - start) / 2

        return once

    return _link(timer, there_and_back)


def peer_link(before: Device, behind: Device, sizes: ProfileSizes = GPU_PROFILE) -> LinkProfile | None:
    """Copies from one GPU of this process to another one; None if they do not reach each other."""
    if before.host or behind.host or not before.reaches(behind):
        return None
    stream = behind.copy_stream()

    def there(size: int) -> Callable[[], float]:
        source, target = before.zeros(size, np.uint8), behind.zeros(size, np.uint8)
        before.synchronize()
        behind.synchronize()

        def once() -> float:
            start = time.perf_counter()
            stream.copy(target, source)
            stream.record().wait()
            return time.perf_counter() - start

        return once

    return _link(_Timer(behind, Measuring(sizes)), there)


def peer_links(devices: Sequence[Device]) -> dict[tuple[int, int], LinkProfile]:
    """Links between GPUs of this process that reach each other, by their places in `devices`. Measured in milliseconds
    each."""
    found = {}
    for before, first in enumerate(devices):
        for behind, second in enumerate(devices):
            link = None if before == behind else peer_link(first, second)
            if link is not None:
                found[before, behind] = link
    return found


def _link(timer: _Timer, copy: Callable[[int], Callable[[], float]]) -> LinkProfile:
    """The figures of a way from the seconds of copies of so many bytes."""
    latency = timer.repeated(copy(_ROW)).median
    seconds = timer.repeated(copy(timer.sizes.copied)).median
    return LinkProfile(latency, timer.sizes.copied / max(seconds - latency, 1e-9))
