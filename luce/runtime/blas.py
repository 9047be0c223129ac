"""cuBLASLt or hipBLAS, for large products. Luce also runs without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from luce.errors import DeviceError
from luce.runtime.cublaslt import WORKSPACE, CublasLt
from luce.runtime.device import Array
from luce.runtime.driver import Vendor
from luce.runtime.library import open_library

_NONE, _TRANSPOSE = 0, 1  # hipblasOperation_t
# hipDataType, and the type of sums, which CuPy turns into the library's
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2}
_FLOAT_SUMS, _DEFAULT_ALGORITHM = 0, -1


class Blas(Protocol):
    """The library, on one device's stream. Not thread-safe."""

    #: whether graphs can capture its products
    captured: bool
    #: whether it multiplies int8
    int8: bool

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """out = x weight^T, as in Device.gemm. In the library's column-major order this is out^T [rows, n], the product
        of the transposed [cols, rows] and of [cols, n]. Raises DeviceError or CuPy's errors."""

    def close(self) -> None:
        """Release what the library holds. Idempotent."""


class Hipblas:
    """CuPy's interface, which knows the constants of the library's versions, with its handle for the current device and
    thread and its current stream."""

    captured, int8 = False, False

    def __init__(self, library: Any, handle: Callable[[], int]) -> None:
        self._library = library
        self._handle = handle
        # The library reads the factors at each call.
        self._factors = np.array([1, 0], np.float32)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """As Blas.gemm."""
        (n, cols), rows = x.shape, weight.shape[0]
        if x.dtype == np.int8:
            raise DeviceError("the library does not multiply int8")
        arrays = [
            part
            for array in (weight, x, out)
            for part in (array.data.ptr, _TYPES[array.dtype], array.strides[0] // array.itemsize)
        ]
        one = self._factors.ctypes.data
        sizes = _TRANSPOSE, _NONE, rows, n, cols
        kinds = _FLOAT_SUMS, _DEFAULT_ALGORITHM
        self._library.gemmEx(self._handle(), *sizes, one, *arrays[:6], one + 4, *arrays[6:], *kinds)

    def close(self) -> None:
        """CuPy keeps its handles."""


def load(vendor: Vendor, stream: int, empty: Callable[[int], Array], multiprocessors: int) -> Blas | None:
    """The library of the current device; None if none works.

    `empty` allocates an array of that many bytes on the device. `multiprocessors`: as for CublasLt.
    """
    try:
        from cupy.cuda import cublas, device

        handle = device.get_cublas_handle()
    except (ImportError, RuntimeError):
        return None
    if vendor == "hip":
        return Hipblas(cublas, device.get_cublas_handle)
    # The name finds the library that CuPy's cuBLAS has loaded, wherever its file is.
    found = open_library((f"libcublasLt.so.{cublas.getVersion(handle) // 10000}",))
    return None if found is None else CublasLt(found[0], stream, empty(WORKSPACE), multiprocessors)
