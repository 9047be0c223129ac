"""Products with weights of one type, as profiles have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from luce.ops.fp16 import dequantise
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import multiplies_int8, store_copy
from luce.ops.moe import Routing, expert_matmul, group
from luce.ops.weight import RawTensor, Weight, upload_experts, upload_weight
from luce.profiles.layer_parts import layers_part
from luce.profiles.profile import FormatProfile
from luce.profiles.timer import Timed, Timer, median_of, replayed
from luce.runtime.device import Array, Device

#: random bytes that matrices repeat: to make all of them takes longer than to measure them
_RANDOM = 1 << 20
#: features of the matrices with which kernels are compiled
_FEW_FEATURES = 256
#: features are a multiple of it, as in models: with an odd number the vendor's library takes four times as long (H100,
#: 2048 rows: 145 instead of 556 TFLOP/s)
_TILE = 16
# Types without blocks, which are not unpacked.
_PLAIN = GGMLQuantizationType.F16, GGMLQuantizationType.F32


def can_multiply_int8(device: Device, type: GGMLQuantizationType) -> bool:
    """Whether products of many rows with weights of a type can be those of int8 rows."""
    return device.blas and device.int8_gemm and type not in _PLAIN


@dataclass(frozen=True)
class _Work:
    """Work that is timed, and how much it is: bytes or operations."""

    amount: float
    timed: Timed

    @property
    def rate(self) -> float:
        return self.amount / self.timed.median


class Products:
    """Products with weights of one type."""

    def __init__(self, timer: Timer, type: GGMLQuantizationType) -> None:
        self._timer, self._device, self._sizes, self._type = timer, timer.device, timer.sizes, type
        self._timed: list[Timed] = []
        # By rows, operations, and of one row also the bytes that it reads.
        self._rates: dict[int, _Work] = {}
        self._read: _Work
        # The matrix that one row reads, on the host.
        self._matrix_of_row: Weight | None = None
        self._unpacking: _Work | None = None
        # Layers of a row, the number of them, and the bytes that they read.
        self._layers: tuple[_Work, int] | None = None
        # By rows, bytes and operations.
        self._experts: dict[int, tuple[_Work, _Work]] = {}
        self._int8: dict[int, _Work] = {}
        self._int8_unpacking: _Work | None = None

    def measure(self) -> None:
        """Time all products but those of `measure_layers`; what they took is known when the timer has finished."""
        timer, name = self._timer, self._type.name
        weight = self._matrix()
        for rows in self._sizes.rows:
            if rows > 16 and self._unpacks and self._unpacking is None:
                timer.tell(f"{name}, unpacking")
                self._unpacking = self._unpack(weight)
            timer.tell(f"{name}, {rows} row{'s' if rows > 1 else ''}")
            own, self._rates[rows] = self._product(rows, weight, cut=True)
            if rows == 1:
                self._read = _Work(own.nbytes, self._rates[1].timed)
                self._matrix_of_row = own if self._device.host else None
        if timer.how.int8 and can_multiply_int8(self._device, self._type):
            timer.tell(f"{name}, int8")
            self._measure_int8(weight)
        if timer.how.experts:
            timer.tell(f"{name}, experts")
            del weight, own
            self._measure_experts()

    def measure_layers(self) -> None:
        """On the host, time what a row takes in layers of small products, which read the matrix that `measure` read.

        To be called when all types are measured: in each round the matrices of the other types then come between, and a
        large last-level cache holds this one no longer.
        """
        if self._matrix_of_row is None:
            return
        self._timer.tell(f"{self._type.name}, layers")
        part, layers = layers_part(self._device, self._matrix_of_row)
        self._layers = _Work(part.amount, self._time(replayed(self._device, part.run))), layers

    def profile(self) -> FormatProfile:
        """The figures of what was timed."""
        return FormatProfile(
            self._read.rate,
            {rows: work.rate for rows, work in self._rates.items()},
            None if self._unpacking is None else self._unpacking.rate,
            max(timed.spread for timed in self._timed),
            any(timed.noisy for timed in self._timed),
            {rows: self._gather(rows) for rows in self._experts},
            {rows: work.rate for rows, work in self._int8.items()},
            None if self._int8_unpacking is None else self._int8_unpacking.rate,
            self._layer(),
        )

    def _time(self, work: Callable[[], object]) -> Timed:
        self._timed.append(timed := self._timer.runs(work))
        return timed

    def _product(self, rows: int, weight: Weight, *, cut: bool = False) -> tuple[Weight, _Work]:
        """The operations of a product of so many rows, and the matrix: with `cut` as much as there is time for."""
        x = self._rows(rows, weight.cols)
        own = self._cut(weight, x) if cut else weight
        return own, _Work(2 * rows * own.rows * own.cols, self._time(partial(matmul, self._device, x, own)))

    def _measure_int8(self, weight: Weight) -> None:
        """Products and unpacking, with a copy of the matrix in int8."""
        device = self._device
        weight.copy, weight.int8 = None, True
        store_copy(device, weight)
        self._int8_unpacking = _Work(weight.rows * weight.cols, self._time(partial(store_copy, device, weight)))
        for rows in self._sizes.rows:
            if multiplies_int8(device, rows, weight):
                _, self._int8[rows] = self._product(rows, weight)

    def _layer(self) -> float:
        """Seconds of a row in a layer beside reading its weights."""
        if self._layers is None:
            return 0.0
        (work, layers), read = self._layers, self._read
        share = work.amount / read.amount
        return max(median_of(lambda own, read: own - share * read, work.timed, read.timed), 0.0) / layers

    def launch(self) -> None:
        """Launch the kernels of all products, with a matrix of few features."""
        weight = self._matrix(_FEW_FEATURES)
        for rows in self._sizes.rows:
            matmul(self._device, self._rows(rows, weight.cols), weight)
        if self._unpacks:
            store_copy(self._device, weight)
        if self._timer.how.int8 and can_multiply_int8(self._device, self._type):
            weight.copy, weight.int8 = None, True
            store_copy(self._device, weight)
            matmul(self._device, self._rows(self._sizes.rows[-1], weight.cols), weight)
        if self._timer.how.experts:
            experts = self._expert_matrices(16)
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
        return not self._device.host and self._device.blas and self._type not in _PLAIN

    def _unpack(self, weight: Weight) -> _Work:
        """Bytes of unpacking, which stays for the products of many rows."""
        device = self._device
        store_copy(device, weight)
        fp16 = weight.copy
        assert fp16 is not None

        def work() -> None:
            for part in weight.parts:
                dequantise(device, part.data, part.type, fp16[part.first : part.first + part.rows])

        return _Work(2 * weight.rows * weight.cols, self._time(work))

    def _measure_experts(self) -> None:
        sizes = self._sizes.experts
        weight = self._expert_matrices(_whole_tiles(sizes.bytes // self._row_bytes()))
        for rows in sizes.rows:
            timed = self._time(self._expert_product(weight, rows))
            touched = 1 - (1 - sizes.used / sizes.count) ** rows
            operations = 2 * rows * sizes.used * (weight.rows // sizes.count) * weight.cols
            self._experts[rows] = _Work(touched * weight.nbytes, timed), _Work(operations, timed)

    def _gather(self, rows: int) -> float:
        """The share of the speed of a matrix that experts reach; their time is that of the bytes they touch or of the
        arithmetic (layer_time.py of the planner)."""
        size, operations = self._experts[rows]
        read, product = self._read, self._rates[max(count for count in self._rates if count <= rows)]

        def share(own: float, read_seconds: float, product_seconds: float) -> float:
            reading = size.amount * read_seconds / read.amount
            return max(reading, operations.amount * product_seconds / product.amount) / max(own, 1e-9)

        return min(1.0, median_of(share, size.timed, read.timed, product.timed))

    def _expert_matrices(self, features: int) -> Weight:
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
