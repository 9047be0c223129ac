"""The calls of cuBLASLt, answered by a library made of ctypes and NumPy: what it is given, and what it returns."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest

from luce.errors import DeviceError
from luce.runtime import cublaslt
from luce.runtime.cublaslt import WORKSPACE, CublasLt
from tests.support.blas_arrays import columns, on_device

_HANDLE = 77
# Features and rows of tiles by the library's number, from its header.
_TILE_SIZES = {20: (128, 128), 24: (256, 128), 29: (128, 160), 201: (176, 128), 248: (320, 128)}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t of the library's header."""

    _fields_ = (("data", c_uint64 * 8),)


class Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t of the library's header."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


def algorithm_at(pointer: int) -> Any:
    return ctypes.cast(pointer, POINTER(Algorithm))[0]


class Library:
    """Suggests the tiles that it is given, with as many parts of the columns; a tile is swizzled by adding 1000."""

    def __init__(self, tiles: Sequence[int] = (20,), parts: Sequence[int] | None = None, failing: str = "") -> None:
        self.tiles, self.parts, self.failing = tiles, parts or [1] * len(tiles), failing
        self.made: dict[int, Any] = {}
        self.alive = 0
        self.preferences: list[dict[int, int]] = []
        self.used: list[tuple[int, int, Any, Any]] = []
        self.multiplies = True
        out = POINTER(c_void_p)
        types: dict[str, tuple[Any, ...]] = {
            "Create": (out,),
            "Destroy": (c_void_p,),
            "MatmulDescCreate": (out, c_int, c_int),
            "MatmulDescSetAttribute": (c_void_p, c_int, POINTER(c_int32), c_size_t),
            "MatmulDescDestroy": (c_void_p,),
            "MatrixLayoutCreate": (out, c_int, c_uint64, c_uint64, c_int64),
            "MatrixLayoutDestroy": (c_void_p,),
            "MatmulPreferenceCreate": (out,),
            "MatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
            "MatmulPreferenceDestroy": (c_void_p,),
            "MatmulAlgoGetHeuristic": (c_void_p,) * 7 + (c_int, c_void_p, POINTER(c_int)),
            "MatmulAlgoConfigGetAttribute": (
                c_void_p,
                c_int,
                POINTER(c_uint32),
                c_size_t,
                POINTER(c_size_t),
            ),
            "MatmulAlgoConfigSetAttribute": (c_void_p, c_int, POINTER(c_uint32), c_size_t),
            "MatmulAlgoCheck": (c_void_p,) * 6 + (c_void_p, c_void_p),
            "Matmul": (c_void_p,) * 12 + (c_void_p, c_void_p, c_size_t, c_void_p),
        }
        for name, arguments in types.items():
            answer = (lambda *_: 13) if name == failing else getattr(self, f"_{name}")
            setattr(self, f"cublasLt{name}", CFUNCTYPE(c_int, *arguments)(answer))

    def _new(self, at: Any, what: Any) -> int:
        at[0] = number = 1000 + len(self.made)
        self.made[number] = what
        self.alive += 1
        return 0

    def _gone(self, at: int) -> int:
        assert self.made.pop(at, None) is not None, "released twice, or never made"
        self.made[-at] = None  # its number is not used again
        self.alive -= 1
        return 0

    def _Create(self, handle: Any) -> int:
        handle[0] = _HANDLE
        self.alive += 1
        return 0

    def _Destroy(self, handle: int) -> int:
        assert handle == _HANDLE
        self.alive -= 1
        return 0

    def _MatmulDescCreate(self, at: Any, compute: int, factors: int) -> int:
        return self._new(at, {"compute": (compute, factors)})

    def _MatmulDescSetAttribute(self, at: int, place: int, value: Any, size: int) -> int:
        assert size == 4
        self.made[at][place] = value[0]
        return 0

    def _MatrixLayoutCreate(self, at: Any, kind: int, rows: int, count: int, leading: int) -> int:
        return self._new(at, (kind, rows, count, leading))

    def _MatmulPreferenceCreate(self, at: Any) -> int:
        return self._new(at, {})

    def _MatmulPreferenceSetAttribute(self, at: int, place: int, value: int, size: int) -> int:
        kind = {4: c_uint32, 8: c_uint64}[size]
        self.made[at][place] = ctypes.cast(value, POINTER(kind))[0]
        return 0

    def _MatmulPreferenceDestroy(self, at: int) -> int:
        self.preferences.append(self.made[at])
        return self._gone(at)

    _MatmulDescDestroy = _MatrixLayoutDestroy = _gone

    def _MatmulAlgoGetHeuristic(self, handle: int, *given: Any) -> int:
        *_, most, at, count = given
        made = ctypes.cast(at, POINTER(Suggestion))
        assert handle == _HANDLE
        found = list(zip(self.tiles, self.parts, strict=True))[:most]
        for one, (tile, parts) in zip(made[: len(found)], found, strict=True):
            one.algorithm.data[0], one.algorithm.data[1] = tile, parts
            one.workspace = 8 * tile
        count[0] = len(found)
        return 0

    def _MatmulAlgoConfigGetAttribute(self, at: Any, place: int, value: Any, size: int, written: Any) -> int:
        assert size == 4
        value[0] = {1: algorithm_at(at).data[0], 2: algorithm_at(at).data[1]}[place]
        written[0] = 4
        return 0

    def _MatmulAlgoConfigSetAttribute(self, at: Any, place: int, value: Any, size: int) -> int:
        assert (place, value[0], size) == (4, 1, 4)
        algorithm_at(at).data[0] += 1000
        return 0

    def _MatmulAlgoCheck(self, handle: int, *given: Any) -> int:
        ctypes.cast(given[-1], POINTER(Suggestion))[0].workspace = 24
        return 0

    def _Matmul(self, handle: int, sums: int, *given: Any) -> int:
        alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, size, stream = given
        assert handle == _HANDLE and (c, c_layout) == (d, d_layout)
        compute, factors = self.made[sums]["compute"]
        assert self.made[sums][3] == 1, "the first matrix is transposed"
        kind = c_int32 if factors == 10 else ctypes.c_float
        assert [ctypes.cast(at, POINTER(kind))[0] for at in (alpha, beta)] == [1, 0]
        layouts = [self.made[at] for at in (a_layout, b_layout, c_layout)]
        assert compute == (72 if layouts[0][0] == 3 else 68)
        self.used.append((algorithm_at(algorithm).data[0], size, workspace, stream))
        if not self.multiplies:
            return 0
        (a_kind, k, m, lda), (b_kind, k2, n, ldb), (c_kind, m2, n2, ldc) = layouts
        assert (k, m, n) == (k2, m2, n2)
        left, right = columns(a, k, m, a_kind, lda), columns(b, k, n, b_kind, ldb)
        columns(c, m, n, c_kind, ldc)[...] = left.T.astype(np.float64) @ right.astype(np.float64)
        return 0


_SPACE = on_device(np.empty(1, np.uint8), 4096)


def opened(library: Library, multiprocessors: int = 0) -> CublasLt:
    return CublasLt(library, 5, _SPACE, multiprocessors)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(np.float32, np.float32), (np.float16, np.float32), (np.float16, np.float16), (np.int8, np.int32)],
)
def test_products_of_parts_of_arrays(dtype: Any, result: Any) -> None:
    random = np.random.default_rng(0)
    x, weight = (random.integers(-100, 100, (rows, 40)).astype(dtype) for rows in (7, 11))
    if dtype != np.int8:
        x, weight = x / dtype(64), weight / dtype(64)
    out = np.zeros((7, 20), result)
    library = Library()
    device = opened(library)
    for _ in range(2):
        out[:] = 0
        device.gemm(on_device(x[:, :24]), on_device(weight[:, 8:32]), on_device(out[:, 3:14]))
        exact = x[:, :24].astype(np.float64) @ weight[:, 8:32].astype(np.float64).T
        np.testing.assert_allclose(out[:, 3:14], exact, rtol=1e-3 if result == np.float16 else 1e-6, atol=1e-3)
        assert not out[:, :3].any() and not out[:, 14:].any()
    assert library.used == [(20, 160, 4096, 5)] * 2
    assert len(library.preferences) == 1, "the second product has the plan of the first"
    assert library.preferences[0][3] == 3, "sums of parts stay in float32"
    device.close()
    device.close()
    assert library.alive == 0


def test_the_library_learns_how_arrays_are_aligned() -> None:
    """It takes 256 bytes for granted, and reads beside the array where that is wrong."""
    library = Library()
    library.multiplies = False
    device, array = opened(library), np.zeros((8, 8), np.float32)
    for weight, x, out in ((512, 768, 4096), (528, 768, 4096), (512, 776, 4100)):
        device.gemm(on_device(array, x), on_device(array, weight), on_device(array, out))
    aligned = [[one[place] for place in (5, 6, 7, 8)] for one in library.preferences]
    assert aligned == [[256, 256, 256, 256], [16, 256, 256, 256], [256, 8, 4, 4]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_products_of_halves_get_no_workspace(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(cublaslt, "MANY_RESULTS", 8 * 16)
    library = Library()
    device = opened(library)
    x, few, many = (on_device(np.zeros((rows, 8), dtype)) for rows in (8, 15, 16))
    for weight in (few, many):
        device.gemm(x, weight, on_device(np.zeros((8, weight.shape[0]), np.float32)))
    given = [one[1] for one in library.preferences]
    assert given == [WORKSPACE, 0 if dtype == np.float16 else WORKSPACE]


def chosen(library: Library, rows: int, features: int, multiprocessors: int = 132, dtype: Any = np.float16) -> int:
    """The tile of a product of 64 columns."""
    library.multiplies = False
    device = opened(library, multiprocessors)
    x, weight = np.zeros((rows, 64), dtype), np.zeros((features, 64), dtype)
    result = {np.int8: np.int32, np.float32: np.float32}.get(dtype, np.float16)
    device.gemm(on_device(x), on_device(weight), on_device(np.zeros((rows, features), result)))
    device.close()
    assert library.alive == 0
    return library.used[-1][0]


@pytest.mark.parametrize(
    ("rows", "features", "tiles", "best"),
    [
        # Measured on an H200 as the fastest of the library's suggestions.
        (2048, 34816, (24, 20, 248, 201, 29), 201),
        (8192, 34816, (248, 24, 201), 201),
        (2048, 5120, (248, 24, 29), 29),
        # Of 2048 features: 128 tiles, one for each multiprocessor; smaller tiles fill two rounds as well.
        (2048, 2048, (24, 20), 24),
    ],
)
def test_tiles_that_fill_the_multiprocessors(rows: int, features: int, tiles: tuple[int, ...], best: int) -> None:
    assert chosen(Library(tiles), rows, features) == best
    times = {tile: -(-rows // _TILE_SIZES[tile][1]) * -(-features // _TILE_SIZES[tile][0]) / 132 for tile in tiles}
    sizes = {tile: _TILE_SIZES[tile][0] * _TILE_SIZES[tile][1] for tile in tiles}
    rounds = {tile: np.ceil(time) * sizes[tile] for tile, time in times.items()}
    assert rounds[best] <= 1.005 * min(rounds.values()), "no other tile computes fewer results"


def test_the_first_suggestion_stands() -> None:
    """On other GPUs, for few rows, where its speed is not known, and where others add up parts of the columns."""
    tiles = 248, 201
    assert chosen(Library(tiles), 2048, 34816) == 201
    assert chosen(Library(tiles), 2048, 34816, multiprocessors=0) == 248
    assert chosen(Library(tiles), 511, 34816) == 248
    assert chosen(Library((7, 201)), 2048, 34816) == 7
    assert chosen(Library(tiles, [1, 2]), 2048, 34816) == 248
    assert chosen(Library(tiles, [2, 1]), 2048, 34816) == 248


def test_integers_are_multiplied_in_a_swizzled_order() -> None:
    assert chosen(Library((20, 24)), 512, 4096, dtype=np.int8) == 1020
    assert chosen(Library((20, 24)), 511, 4096, dtype=np.int8) == 20
    assert chosen(Library((20, 24)), 512, 4096, multiprocessors=0, dtype=np.int8) == 20
    for failing in ("MatmulAlgoConfigSetAttribute", "MatmulAlgoCheck"):
        assert chosen(Library((20, 24), failing=failing), 512, 4096, dtype=np.int8) == 20


def test_large_products_of_halves_read_as_little_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MANY_VALUES", 8192 * 64)
    tiles = 248, 29, 24
    assert chosen(Library(tiles), 8192, 5120) == 1024
    assert chosen(Library(tiles), 8191, 5120) == 29
    assert chosen(Library(tiles), 8192, 5120, multiprocessors=0) == 248
    assert chosen(Library(tiles), 8192, 5120, dtype=np.float32) == 29
    assert chosen(Library((248, 29)), 8192, 5120) == 29
    assert chosen(Library(tiles, [1, 1, 2]), 8192, 5120) == 29
    for failing in ("MatmulAlgoConfigSetAttribute", "MatmulAlgoCheck"):
        assert chosen(Library(tiles, failing=failing), 8192, 5120) == 29


def test_plans_of_many_shapes_are_let_go() -> None:
    library = Library()
    device, weight = opened(library), np.ones((4, 8), np.float32)
    kept = []
    for rows in (*range(1, 1031), 1, 2):
        x, out = np.ones((rows, 8), np.float32), np.zeros((rows, 4), np.float32)
        device.gemm(on_device(x), on_device(weight), on_device(out))
        assert (out == 8).all()
        kept.append(library.alive)
    # A handle, two kinds of sums, and three layouts of each plan.
    assert max(kept) == 3 + 3 * 1024 and kept[1023:1026] == [max(kept), 6, 9]
    device.close()
    assert library.alive == 0


def test_calls_that_fail() -> None:
    array = on_device(np.zeros((8, 8), np.float32))
    for failing in ("Matmul", "MatmulAlgoGetHeuristic"):
        library = Library(failing=failing)
        with pytest.raises(DeviceError, match=f"cublasLt{failing} failed with status 13"):
            opened(library).gemm(array, array, array)
        assert len(library.preferences) == 1, "it was released"
    with pytest.raises(DeviceError, match="the library suggests no algorithm"):
        opened(Library(())).gemm(array, array, array)
