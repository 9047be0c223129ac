"""cuBLASLt, for large products on CUDA.

The library suggests algorithms for a product. All that were tried give the same bits (H200, library 13.1, products of
2048 and 8192 rows), and the first one is not always the fastest: on Hopper this module estimates them by how many
rounds their tiles take. Of 2048 x 34816 x 5120 in fp16 tiles of 256 x 128 fill 16.5 rounds of 132 multiprocessors and
take 1157 us, tiles of 176 x 128 fill 24.0 smaller rounds and take 1065. docs/internals/performance.md has more.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any

import numpy as np

from luce.errors import DeviceError
from luce.runtime.device import Array

# cudaDataType_t
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, np.dtype(np.int8): 3, np.dtype(np.int32): 10}
# Of cublasComputeType_t and cudaDataType_t: sums and factors in float32, in int32.
_FLOAT_SUMS, _INT_SUMS = (68, 0), (72, 10)
_TRANSPOSE_FIRST, _TRANSPOSED = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
# CUBLASLT_MATMUL_PREF_*: bytes of workspace, reductions, alignments of the four matrices.
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_IN_PLACE_OR_FLOAT = 3  # sums of parts of the columns stay in float32 where results are fp16
_TILE, _PARTS, _SWIZZLE = 1, 2, 4  # CUBLASLT_ALGO_CONFIG_*
_SUGGESTIONS = 16
_MOST_ALIGNMENT = 256
# Plans that are kept: prompts end with any number of rows.
_PLANS = 1024

#: bytes of device memory that products may use; cuBLAS's own default on Hopper
WORKSPACE = 32 << 20
#: Products of fp16 with so many results get no workspace: their tiles alone fill a GPU, and the library would clear
#: memory before each. 2048 x 34816 x 5120 takes 942 us without and 954 with it, 2048 x 9216 x 2048 110.0 and 111.9, but
#: 2048 x 12352 x 2048 137.2 and 134.3, 2048 x 2048 x 4096 46.8 and 45.3 (H200).
MANY_RESULTS = 16 << 20
#: from so many rows on, algorithms are chosen here
CHOSEN_ROWS = 512

#: Of fp16, where x has so many values, the largest usual tiles in a swizzled order, which read least again: the card is
#: at its limit of power then, and rounds count less. 8192 x 5120 x 17408 takes 2190 us so, and 2286 in the tiles that
#: fill their rounds best, for seconds on end; in runs of 10 ms it is the other way round (H200).
MANY_VALUES = 64 << 20

# Features and rows of the tiles by cublasLtMatmulTile_t, as far as their speed is known.
_TILES = {
    20: (128, 128),
    23: (128, 256),
    24: (256, 128),
    29: (128, 160),
    31: (192, 128),
    32: (128, 192),
    194: (160, 192),
    195: (160, 256),
    197: (168, 128),
    201: (176, 128),
    209: (192, 192),
    221: (224, 128),
    240: (288, 128),
    248: (320, 128),
}
# Time of a result in tiles of at most so many results. Small ones read more for each; middle ones seem to be stored
# while others are multiplied: 8192 x 34816 x 5120 takes 4481 us in 176 x 128, 4541 in 256 x 128 and 4670 in 320 x 128,
# with as many results in whole rounds; 2048 x 5120 x 17408 539 in 128 x 160 and 559 in 128 x 128 (H200).
_TIMES = ((128 * 128, 1.015), (176 * 128, 1.0), (256 * 128, 1.015), (1 << 30, 1.03))
_LARGEST = 24
# The first suggestion stands where no other one is estimated to be faster by more than this.
_MARGIN = 0.98


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class _Product:
    """What a plan depends on. `types`, `strides` (elements from row to row), `aligned` (bytes): of weight, x, out."""

    rows: int
    features: int
    cols: int
    types: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it multiplies integers."""
        return self.types[0] == _TYPES[np.dtype(np.int8)]

    @property
    def halves(self) -> bool:
        """Whether it multiplies fp16."""
        return self.types[0] == _TYPES[np.dtype(np.float16)]


@dataclass(frozen=True)
class _Plan:
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    algorithm: _Algorithm
    workspace: int


class CublasLt:
    """The library of the current device, on `stream`; captured products use the `workspace` too.

    `multiprocessors`: of a Hopper GPU, for which algorithms are chosen; 0: each product takes the first suggestion.
    """

    captured, int8 = True, True

    def __init__(self, library: ctypes.CDLL, stream: int, workspace: Array, multiprocessors: int = 0) -> None:
        self._library = library
        self._stream = stream
        self._workspace = workspace
        self._multiprocessors = multiprocessors
        self._plans: dict[_Product, _Plan] = {}
        # The library reads the factors, of the sums' type, at each call.
        self._floats, self._ints = (c_float * 2)(1.0, 0.0), (c_int32 * 2)(1, 0)
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._sums = {whole: self._descriptor(*(_INT_SUMS if whole else _FLOAT_SUMS)) for whole in (False, True)}
        matrix = (c_void_p, c_void_p)
        self._matmul = library.cublasLtMatmul
        self._matmul.argtypes = (c_void_p, c_void_p, c_void_p, *matrix, *matrix, c_void_p, *matrix, *matrix, c_void_p,
                                 c_void_p, c_size_t, c_void_p)  # fmt: skip

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """As Blas.gemm (luce.runtime.blas). Raises DeviceError."""
        arrays = weight, x, out
        pointers = [int(array.data.ptr) for array in arrays]
        types, strides = zip(
            *((_TYPES[array.dtype], array.strides[0] // array.itemsize) for array in arrays), strict=True
        )
        aligned = tuple(min(at & -at, _MOST_ALIGNMENT) for at in pointers)
        product = _Product(x.shape[0], weight.shape[0], x.shape[1], types, strides, aligned)
        plan = self._plans.get(product)
        if plan is None:
            plan = self._plans[product] = self._plan(product)
        factors = ctypes.addressof(self._ints if product.whole else self._floats)
        first, second, result = ((at, layout) for at, layout in zip(pointers, plan.layouts, strict=True))
        status = self._matmul(
            self._handle, self._sums[product.whole], factors, *first, *second, factors + 4, *result, *result,
            byref(plan.algorithm), self._workspace.data.ptr, plan.workspace, self._stream,
        )  # fmt: skip
        self._check("cublasLtMatmul", status)

    def close(self) -> None:
        """As Blas.close."""
        self._forget()
        if self._handle:
            for descriptor in self._sums.values():
                self._library.cublasLtMatmulDescDestroy(descriptor)
            self._library.cublasLtDestroy(self._handle)
            self._handle = c_void_p()

    def _descriptor(self, compute: int, factor: int) -> c_void_p:
        made = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(made), c_int(compute), c_int(factor))
        self._set("cublasLtMatmulDescSetAttribute", made, _TRANSPOSE_FIRST, c_int32(_TRANSPOSED))
        return made

    def _plan(self, product: _Product) -> _Plan:
        if len(self._plans) >= _PLANS:
            self._forget()
        shapes = (product.cols, product.features), (product.cols, product.rows), (product.features, product.rows)
        layouts = []
        for type, (rows, cols), stride in zip(product.types, shapes, product.strides, strict=True):
            layouts.append(c_void_p())
            sizes = c_uint64(rows), c_uint64(cols), c_int64(stride)
            self._call("cublasLtMatrixLayoutCreate", byref(layouts[-1]), c_int(type), *sizes)
        weight, x, out = layouts
        plan = self._best(product, (weight, x, out))
        return _Plan((weight, x, out), plan.algorithm, plan.workspace)

    def _suggestions(self, product: _Product, layouts: tuple[c_void_p, c_void_p, c_void_p]) -> list[_Suggestion]:
        """What the library suggests, the best by its estimate first; raises DeviceError where it has nothing."""
        wide = product.halves and product.rows * product.features >= MANY_RESULTS
        preference, (weight, x, out) = c_void_p(), layouts
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            wanted = [
                (_MOST_WORKSPACE, c_uint64(0 if wide else WORKSPACE)),
                (_REDUCTIONS, c_uint32(_IN_PLACE_OR_FLOAT)),
            ]
            aligned = *product.aligned, product.aligned[2]
            wanted += [(place, c_uint32(of)) for place, of in zip(_ALIGNMENTS, aligned, strict=True)]
            for place, value in wanted:
                self._set("cublasLtMatmulPreferenceSetAttribute", preference, place, value)
            made, count = (_Suggestion * _SUGGESTIONS)(), c_int()
            given = self._sums[product.whole], weight, x, out, out, preference, c_int(_SUGGESTIONS)
            self._call("cublasLtMatmulAlgoGetHeuristic", self._handle, *given, made, byref(count))
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [one for one in made[: count.value] if one.state == 0]

    def _best(self, product: _Product, layouts: tuple[c_void_p, c_void_p, c_void_p]) -> _Suggestion:
        suggestions = self._suggestions(product, layouts)
        if not suggestions:
            raise DeviceError("the library suggests no algorithm")
        first = suggestions[0]
        if not self._multiprocessors or product.rows < CHOSEN_ROWS:
            return first
        if product.whole:
            return self._swizzled(first, product, layouts) or first
        if product.halves and product.rows * product.cols >= MANY_VALUES:
            largest = (one for one in suggestions if self._tile(one) == _LARGEST)
            swizzled = next((self._swizzled(one, product, layouts) for one in largest), None)
            if swizzled is not None:
                return swizzled
        times = [self._time(one, product) for one in suggestions]
        usual, best = times[0], min((time for time in times if time is not None), default=None)
        if usual is None or best is None or best > _MARGIN * usual:
            return first
        return suggestions[times.index(best)]

    def _tile(self, suggestion: _Suggestion) -> int | None:
        """The number of its tile; None where several tiles have sums of parts of the columns: these would have other
        bits."""
        return self._get(suggestion.algorithm, _TILE) if self._get(suggestion.algorithm, _PARTS) == 1 else None

    def _time(self, suggestion: _Suggestion, product: _Product) -> float | None:
        """An estimate that compares algorithms; None where there is none."""
        tile = _TILES.get(self._tile(suggestion) or 0)
        if tile is None:
            return None
        tiles = -(-product.features // tile[0]) * -(-product.rows // tile[1])
        size = tile[0] * tile[1]
        return -(-tiles // self._multiprocessors) * size * next(time for most, time in _TIMES if size <= most)

    def _swizzled(
        self, suggestion: _Suggestion, product: _Product, layouts: tuple[c_void_p, c_void_p, c_void_p]
    ) -> _Suggestion | None:
        """The algorithm with tiles in an order that shares more of the second-level cache: of int8 2048 x 34816 x 5120
        449 us and 452 without, 8192 x 34816 x 5120 1874 and 2092, 8192 x 5120 x 17408 950 and 976 (H200)."""
        algorithm = _Algorithm.from_buffer_copy(suggestion.algorithm)
        value = c_uint32(1)
        name = "cublasLtMatmulAlgoConfigSetAttribute"
        if getattr(self._library, name)(byref(algorithm), c_int(_SWIZZLE), byref(value), c_size_t(sizeof(value))):
            return None
        checked, (weight, x, out) = _Suggestion(), layouts
        matrices = self._sums[product.whole], weight, x, out, out
        if self._library.cublasLtMatmulAlgoCheck(self._handle, *matrices, byref(algorithm), byref(checked)):
            return None
        checked.algorithm = algorithm
        return checked if checked.workspace <= WORKSPACE else None

    def _get(self, algorithm: _Algorithm, place: int) -> int:
        value, written = c_uint32(), c_size_t()
        size = c_size_t(sizeof(value))
        name = "cublasLtMatmulAlgoConfigGetAttribute"
        self._call(name, byref(algorithm), c_int(place), byref(value), size, byref(written))
        return value.value

    def _set(self, symbol: str, of: c_void_p, place: int, value: Any) -> None:
        self._call(symbol, of, c_int(place), byref(value), c_size_t(sizeof(value)))

    def _call(self, symbol: str, *arguments: Any) -> None:
        self._check(symbol, getattr(self._library, symbol)(*arguments))

    def _check(self, symbol: str, status: int) -> None:
        if status:
            raise DeviceError(f"{symbol} failed with status {status}")

    def _forget(self) -> None:
        for plan in self._plans.values():
            for layout in plan.layouts:
                self._library.cublasLtMatrixLayoutDestroy(layout)
        self._plans.clear()
