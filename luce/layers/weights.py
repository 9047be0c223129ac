"""Loads a file's tensors to a device, checks their shapes, and records which of them were used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.errors import OutOfMemoryError, UnsupportedError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.model_file import FileRows
from luce.gguf.quants import block_size, dequantize, supported
from luce.gguf.reader import GGUFFile, TensorInfo
from luce.layers.weight_pool import WeightPool
from luce.ops import moe_prefill_int8
from luce.ops.matmul import MANY_ROWS, invariant_rows
from luce.ops.matmul_prefill import copy_bytes, store_copy
from luce.ops.weight import RawTensor, Weight, WeightPart, upload_experts, upload_weight
from luce.runtime.device import Array, Device


@dataclass(frozen=True)
class _Routed:
    """A matrix of a layer's routed experts."""

    weight: Weight
    experts: int
    gated: bool


class WeightLoader:
    """Tensors of one file for one device. Raises UnsupportedError naming file and tensor if one does not fit.

    `pool`: shares its matrices with others. `int8`: products of many rows with layers' matrices are those of int8 rows
    (luce.ops.matmul_prefill).
    """

    def __init__(self, file: GGUFFile, device: Device, pool: WeightPool | None = None, *, int8: bool = False) -> None:
        self._file = file
        self._device = device
        self._pool = pool
        self._int8 = int8
        self._identity = "" if pool is None else fingerprint(file)
        self._matrices: dict[tuple[str, ...], Weight] = {}
        self._routed: dict[int, list[_Routed]] = {}
        self.used: set[str] = set()
        self.nbytes = 0
        #: up to how many rows the bits of a row of products with these matrices do not depend on the number of rows
        self.invariant_rows = MANY_ROWS

    def forget(self) -> None:
        """Hold no weight: each one stays as long as a layer has it, and is loaded anew when it is asked for again."""
        self._matrices.clear()
        self._routed.clear()

    def matrix(
        self, names: Sequence[str], cols: int, rows: Sequence[int], biases: Sequence[tuple[str, int]] = ()
    ) -> Weight:
        """Matrices GGUF [cols, rows[i]] stacked along the rows. The same names return the same Weight.

        `biases`: names and sizes of the vectors that together are the bias; rows that they do not reach have none.
        """
        key = tuple(names)
        if key not in self._matrices:

            def load() -> Weight:
                tensors = [self._raw(name, (cols, size)) for name, size in zip(names, rows, strict=True)]
                weight = upload_weight(self._device, tensors)
                if biases:
                    whole, at = np.zeros(sum(rows), np.float32), 0
                    for name, size in biases:
                        whole[at : at + size] = self._host_floats(name, (size,))
                        at += size
                    weight.bias = self._device.upload(whole)
                return weight

            self._matrices[key] = self._loaded("matrix", key, load)
            # Also where they are in the pool, and nothing is read.
            self.used.update(key, (name for name, _ in biases))
        return self._matrices[key]

    def reordered(self, parts: Sequence[tuple[str | range, ...]], cols: int) -> Weight:
        """Matrices GGUF [cols, rows] stacked along the rows, each with its rows in another order: a part is a name and
        ranges of rows that together are all of them."""
        named = [(str(part[0]), [own for own in part[1:] if isinstance(own, range)]) for part in parts]
        tensors = [self._raw(name, (cols, sum(map(len, ranges)))) for name, ranges in named]

        def load() -> Weight:
            ordered = []
            for tensor, (_, ranges) in zip(tensors, named, strict=True):
                raw = np.asarray(tensor.raw)
                if len(ranges) > 1:
                    raw = np.concatenate([raw[own.start : own.stop] for own in ranges])
                ordered.append(RawTensor(tensor.name, raw, tensor.type, tensor.cols))
            return upload_weight(self._device, ordered)

        key = tuple(tensor.name for tensor in tensors)
        self._matrices[key] = self._loaded("reordered", key, load)
        return self._matrices[key]

    def table(self, name: str, cols: int, rows: int, columns: range | None = None) -> Weight:
        """A table GGUF [cols, rows] whose rows are looked up, or whole blocks of its columns.

        On the host it stays in quant blocks, as it is stored.
        """
        if columns is None and self._device.packed:
            return self.matrix([name], cols, [rows])
        tensor = self._raw(name, (cols, rows))
        if columns is not None:
            elements, size = block_size(tensor.type)
            raw = np.asarray(tensor.raw)[:, columns.start // elements * size : columns.stop // elements * size]
            tensor = RawTensor(name, np.ascontiguousarray(raw), tensor.type, len(columns))

        def load() -> Weight:
            if self._device.host:
                held = tensor.raw.held() if isinstance(tensor.raw, FileRows) else tensor.raw
                return Weight(rows, tensor.cols, (WeightPart(held, tensor.type, 0, rows),))
            return upload_weight(self._device, [tensor])

        return self._loaded("table", (name, str(columns)), load)

    def experts(
        self,
        names: Sequence[str],
        cols: int,
        rows: Sequence[int],
        experts: int,
        biases: Sequence[str] = (),
        *,
        routed_in: int | None = None,
        gated: bool = False,
    ) -> Weight:
        """Expert matrices GGUF [cols, rows[i], experts], stacked along the rows within each expert, and their `biases`
        [rows[i], experts].

        `routed_in`: the layer whose routed experts have them, of which `store_copies` makes copies; `gated`: as for
        luce.ops.moe_prefill_int8.copy_bytes.
        """
        tensors = [self._raw(name, (cols, size, experts)) for name, size in zip(names, rows, strict=True)]

        def load() -> Weight:
            weight = upload_experts(self._device, tensors, experts)
            if biases:
                each = [
                    self._host_floats(name, (size, experts)).reshape(experts, size)
                    for name, size in zip(biases, rows, strict=True)
                ]
                weight.bias = self._device.upload(np.concatenate(each, axis=1))
            return weight

        self.used.update(biases)
        weight = self._loaded("experts", tuple(names), load)
        if routed_in is not None:
            self._routed.setdefault(routed_in, []).append(_Routed(weight, experts, gated))
        return weight

    def _loaded(self, kind: str, names: tuple[str, ...], load: Callable[[], Weight]) -> Weight:
        if self._pool is None:
            weight = load()
        else:
            device = self._device
            key: tuple[Any, ...] = (self._identity, str(device.name), device.packed, kind, names, self._int8)
            weight = self._pool.weight(key, device, load)
        weight.int8 = self._int8 and names[0].startswith("blk.")
        if kind == "matrix":
            self.invariant_rows = min(self.invariant_rows, invariant_rows(self._device, weight))
        self.nbytes += weight.nbytes
        return weight

    def store_copies(self, spare: int) -> int:
        """Store matrices of layers as products of many rows read them as well, as many as fit in `spare` bytes:
        unpacked ones, and after them those of experts that are multiplied as int8. Returns the bytes that they take.

        A second call with the same number does the same work in the same memory.
        """
        chosen: list[tuple[int, bool, Callable[[], None]]] = []
        left, device = spare, self._device
        for names, weight in self._matrices.items():
            size = copy_bytes(device, weight)
            # The embedding and the head are multiplied with few rows only.
            if names[0].startswith("blk.") and 0 < size <= left:
                chosen.append((size, weight.copy is not None, partial(store_copy, device, weight)))
                left -= size
        for each in itertools.chain(*self._routed.values()):
            size = moe_prefill_int8.copy_bytes(device, each.weight, each.experts, gated=each.gated)
            if 0 < size <= left:
                store = partial(moe_prefill_int8.store_experts, device, each.weight, each.experts, gated=each.gated)
                chosen.append((size, each.weight.int8_experts is not None, store))
                left -= size
        device.reserve(sum(size for size, there, _ in chosen if not there))
        stored = 0
        for size, _, make in chosen:
            try:
                make()
            except OutOfMemoryError:
                # Another process has taken memory since `spare` was measured: the rest stays packed.
                break
            stored += size
        return stored

    def copied(self, layer: int) -> frozenset[str]:
        """The matrices of a layer that `store_copies` has stored unpacked, by the names of their parts in it, and
        `experts` if those of its experts have copies."""
        prefix = f"blk.{layer}."
        stored = (names for names, weight in self._matrices.items() if weight.copy is not None)
        found = {name.removeprefix(prefix) for names in stored for name in names if name.startswith(prefix)}
        if any(each.weight.int8_experts is not None for each in self._routed.get(layer, ())):
            found.add("experts")
        return frozenset(found)

    def vector(self, name: str, size: int) -> Array:
        """A GGUF [size] tensor as float32 [size]."""
        return self._floats(name, (size,))

    def filters(self, name: str, *shape: int) -> Array:
        """A GGUF tensor of this shape, such as [taps, channels], as float32 with its dimensions reversed."""
        return self._floats(name, shape).reshape(*reversed(shape))

    def _floats(self, name: str, shape: tuple[int, ...]) -> Array:
        values = self._host_floats(name, shape)
        self.nbytes += values.nbytes
        return self._device.upload(values)

    def _host_floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        raw = self._raw(name, shape)
        return np.ascontiguousarray(dequantize(np.asarray(raw.raw), raw.type).reshape(-1))

    def _raw(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        info = self._file.tensors.get(name)
        if info is None:
            raise UnsupportedError(f"{self._file.paths[0]}: tensor {name} is missing")
        self._check(name, info, shape)
        self.used.add(name)
        return RawTensor(name, self._file.rows(name), info.type, info.shape[0])

    def _check(self, name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
        # Writers differ in trailing ones: some store a matrix of one row as a vector.
        if _trimmed(info.shape) != _trimmed(shape):
            raise UnsupportedError(
                f"{self._file.paths[0]}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}"
            )
        if not supported(info.type):
            raise UnsupportedError(
                f"{self._file.paths[0]}: tensor {name} has type {info.type.name}, which is not supported"
            )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
