"""The call of cuBLAS, answered by a library made of ctypes and NumPy: what it is given, and what it returns."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import DeviceError
from luce.runtime import blas
from luce.runtime.blas import WORKSPACE, Cublas

_TYPES = {0: np.float32, 2: np.float16}  # CUDA_R_32F, CUDA_R_16F
_COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
_MATRIX = (c_void_p, c_int, c_int)


def on_device(array: NDArray[Any]) -> Any:
    """What CuPy's arrays tell of themselves."""
    return SimpleNamespace(
        data=SimpleNamespace(ptr=array.ctypes.data),
        dtype=array.dtype,
        shape=array.shape,
        strides=array.strides,
        itemsize=array.itemsize,
        nbytes=array.nbytes,
    )


def columns(at: int, rows: int, count: int, kind: int, leading: int) -> NDArray[Any]:
    """[rows, count] in memory, one column behind another, `leading` apart."""
    type = np.dtype(_TYPES[kind])
    memory = (ctypes.c_char * (type.itemsize * (leading * (count - 1) + rows))).from_address(at)
    flat = np.frombuffer(memory, type)
    return np.lib.stride_tricks.as_strided(flat, (rows, count), (type.itemsize, type.itemsize * leading))


class Library:
    """Status 0 from all calls but the products of `failing`."""

    def __init__(self, *, failing: bool = False) -> None:
        self.seen: dict[str, Any] = {}
        self.cublasCreate_v2 = CFUNCTYPE(c_int, POINTER(c_void_p))(self._create)
        self.cublasSetStream_v2 = CFUNCTYPE(c_int, c_void_p, c_void_p)(lambda h, s: self._note("stream", h, s))
        space = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
        self.cublasSetWorkspace_v2 = space(lambda h, at, size: self._note("workspace", h, at, size))
        self.cublasSetMathMode = CFUNCTYPE(c_int, c_void_p, c_int)(lambda h, mode: self._note("mode", h, mode))
        self.cublasDestroy_v2 = CFUNCTYPE(c_int, c_void_p)(lambda h: self._note("destroyed", h))
        arguments = (c_void_p, *(c_int,) * 5, c_void_p, *_MATRIX, *_MATRIX, c_void_p, *_MATRIX, c_int, c_int)
        self.cublasGemmEx = CFUNCTYPE(c_int, *arguments)((lambda *_: 13) if failing else self._gemm)

    def _create(self, handle: Any) -> int:
        handle[0] = 77
        return 0

    def _note(self, what: str, *values: Any) -> int:
        self.seen[what] = values
        return 0

    def _gemm(self, handle: int, *given: Any) -> int:
        first, second, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = given
        factors = [ctypes.cast(at, POINTER(ctypes.c_float))[0] for at in (alpha, beta)]
        # op(A) is A transposed here, op(B) is B.
        assert (handle, first, second, compute, factors) == (77, 1, 0, _COMPUTE_32F, [1.0, 0.0])
        left, right = columns(a, k, m, a_type, lda), columns(b, k, n, b_type, ldb)
        columns(c, m, n, c_type, ldc)[...] = left.T.astype(np.float64) @ right.astype(np.float64)
        return 0


def opened(library: Library) -> tuple[Cublas, Any]:
    workspace = on_device(np.empty(WORKSPACE, np.uint8))
    return Cublas(library, 5, workspace), workspace  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "result"), [(np.float32, np.float32), (np.float16, np.float32), (np.float16, np.float16)]
)
def test_products_of_parts_of_arrays(dtype: Any, result: Any) -> None:
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal((rows, 40)).astype(dtype) for rows in (7, 11))
    out = np.zeros((7, 20), result)
    library = Library()
    library_of_device, workspace = opened(library)
    library_of_device.gemm(on_device(x[:, :24]), on_device(weight[:, 8:32]), on_device(out[:, 3:14]))
    exact = x[:, :24].astype(np.float64) @ weight[:, 8:32].astype(np.float64).T
    np.testing.assert_allclose(out[:, 3:14], exact, rtol=1e-6 if result == np.float32 else 1e-3)
    assert not out[:, :3].any() and not out[:, 14:].any()
    assert library.seen["stream"] == (77, 5)
    assert library.seen["mode"] == (77, 16), "sums of parts stay in float32"
    assert library.seen["workspace"] == (77, workspace.data.ptr, WORKSPACE)
    library_of_device.close()
    library_of_device.close()
    assert library.seen["destroyed"] == (77,)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_products_of_halves_get_no_workspace(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """And the next small ones get it again; the library is told once."""
    monkeypatch.setattr(blas, "MANY_RESULTS", 8 * 16)
    library = Library()
    opened_library, workspace = opened(library)
    x, few, many = (on_device(np.zeros((rows, 8), dtype)) for rows in (8, 15, 16))
    given = []
    for weight in (few, many, many, few):
        library.seen.pop("workspace", None)
        opened_library.gemm(x, weight, on_device(np.zeros((8, weight.shape[0]), np.float32)))
        given.append(library.seen.get("workspace"))
    at = workspace.data.ptr
    halves = dtype == np.float16
    assert given == [None, (77, at, 0), None, (77, at, WORKSPACE)] if halves else not any(given)


def test_a_call_that_fails() -> None:
    failing, _ = opened(Library(failing=True))
    array = on_device(np.zeros((8, 8), np.float32))
    with pytest.raises(DeviceError, match="cublasGemmEx failed with status 13"):
        failing.gemm(array, array, array)
