"""The call of hipBLAS through CuPy, answered by a library made of ctypes and NumPy."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float
from typing import Any

import numpy as np
import pytest

from luce.errors import DeviceError
from luce.runtime.blas import Hipblas
from tests.support.blas_arrays import columns, on_device


class Library:
    def gemmEx(
        self, handle: int, first: int, second: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
        b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        factors = [ctypes.cast(at, POINTER(c_float))[0] for at in (alpha, beta)]
        # op(A) is A transposed here, op(B) is B; sums are float32.
        assert (handle, first, second, compute, algorithm, factors) == (77, 1, 0, 0, -1, [1.0, 0.0])
        left, right = columns(a, k, m, a_type, lda), columns(b, k, n, b_type, ldb)
        columns(c, m, n, c_type, ldc)[...] = left.T.astype(np.float64) @ right.astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "result"), [(np.float32, np.float32), (np.float16, np.float32), (np.float16, np.float16)]
)
def test_products_of_parts_of_arrays(dtype: Any, result: Any) -> None:
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal((rows, 40)).astype(dtype) for rows in (7, 11))
    out = np.zeros((7, 20), result)
    device = Hipblas(Library(), lambda: 77)
    device.gemm(on_device(x[:, :24]), on_device(weight[:, 8:32]), on_device(out[:, 3:14]))
    exact = x[:, :24].astype(np.float64) @ weight[:, 8:32].astype(np.float64).T
    np.testing.assert_allclose(out[:, 3:14], exact, rtol=1e-6 if result == np.float32 else 1e-3)
    assert not out[:, :3].any() and not out[:, 14:].any()


def test_it_does_not_multiply_int8() -> None:
    x, out = np.ones((8, 8), np.int8), np.zeros((8, 8), np.int32)
    with pytest.raises(DeviceError, match="does not multiply int8"):
        Hipblas(Library(), lambda: 77).gemm(on_device(x), on_device(x), on_device(out))
