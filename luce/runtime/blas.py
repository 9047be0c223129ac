"""cuBLAS or hipBLAS through CuPy: the one call that large products need. Luce also runs without the library."""

from __future__ import annotations

from typing import Any

import numpy as np

from luce.runtime.device import Array
from luce.runtime.driver import Vendor

_NONE, _TRANSPOSE = 0, 1  # cublasOperation_t
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2}  # cudaDataType_t
# cublasComputeType_t for CUDA; what CuPy turns into hipBLAS's type is a cudaDataType_t.
_COMPUTE_FLOAT: dict[Vendor, int] = {"cuda": 68, "hip": 0}
_DEFAULT_ALGORITHM = -1


class Blas:
    """The library, with CuPy's handle for the current device and thread and CuPy's current stream."""

    def __init__(self, vendor: Vendor, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._compute = _COMPUTE_FLOAT[vendor]
        # The library reads the factors when it is called.
        self._factors = np.array([1, 0], np.float32)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """out = x weight^T on the current device, as Device.gemm says. To the library, which puts columns first, this
        is out^T [rows, n] of the transposed [cols, rows] and of [cols, n]."""
        (n, cols), rows = x.shape, weight.shape[0]
        one = self._factors.ctypes.data
        self._library.gemmEx(
            self._handle(),
            _TRANSPOSE,
            _NONE,
            rows,
            n,
            cols,
            one,
            weight.data.ptr,
            _TYPES[weight.dtype],
            weight.strides[0] // weight.itemsize,
            x.data.ptr,
            _TYPES[x.dtype],
            x.strides[0] // x.itemsize,
            one + 4,
            out.data.ptr,
            _TYPES[out.dtype],
            out.strides[0] // out.itemsize,
            self._compute,
            _DEFAULT_ALGORITHM,
        )


def load(vendor: Vendor) -> Blas | None:
    """The library that CuPy finds for the current device; None if there is none, or none that works."""
    try:
        from cupy.cuda import cublas, device

        device.get_cublas_handle()
    except (ImportError, RuntimeError):
        return None
    return Blas(vendor, cublas, device.get_cublas_handle)
