"""cuBLAS or hipBLAS, for large products. Luce also runs without them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

from luce.errors import DeviceError
from luce.runtime.device import Array
from luce.runtime.driver import Vendor
from luce.runtime.library import open_library

_NONE, _TRANSPOSE = 0, 1  # cublasOperation_t
# cudaDataType_t
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, np.dtype(np.int8): 3, np.dtype(np.int32): 10}
_DEFAULT_ALGORITHM = -1
_FLOAT_PARTS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
#: bytes of device memory that products may use; the library's own default on Hopper
WORKSPACE = 32 << 20
#: Products of fp16 with so many results get none: their tiles alone fill a GPU, and the library would clear memory
#: before each. 2048 x 34816 x 5120 takes 942 us without and 954 with it, 2048 x 9216 x 2048 110.0 and 111.9, but
#: 2048 x 12352 x 2048 137.2 and 134.3, 2048 x 2048 x 4096 46.8 and 45.3 (H200).
MANY_RESULTS = 16 << 20


class Blas(ABC):
    """The library, on one device's stream. Not thread-safe."""

    #: whether graphs can capture its products
    captured: bool
    #: the library's code for sums accumulated in float32
    compute: int
    #: that for sums in int32 of products of int8; None: it has none
    compute_int8: int | None = None

    def __init__(self) -> None:
        # The library reads the factors, of the sums' type, at each call.
        self._factors = np.array([1, 0], np.float32), np.array([1, 0], np.int32)
        self._ones = tuple(factors.ctypes.data for factors in self._factors)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """out = x weight^T, as in Device.gemm. In the library's column-major order this is out^T [rows, n], the product
        of the transposed [cols, rows] and of [cols, n]. Raises DeviceError or CuPy's errors."""
        (n, cols), rows = x.shape, weight.shape[0]
        arrays = [
            part
            for array in (weight, x, out)
            for part in (array.data.ptr, _TYPES[array.dtype], array.strides[0] // array.itemsize)
        ]
        whole = x.dtype == np.int8
        compute = self.compute_int8 if whole else self.compute
        if compute is None:
            raise DeviceError("the library does not multiply int8")
        sizes, one, zero = (_TRANSPOSE, _NONE, rows, n, cols), self._ones[whole], self._ones[whole] + 4
        self._call(*sizes, one, *arrays[:6], zero, *arrays[6:], compute, _DEFAULT_ALGORITHM)

    @abstractmethod
    def _call(self, *arguments: int) -> None:
        """cublasGemmEx without the handle."""

    @abstractmethod
    def close(self) -> None:
        """Release the library's handle. Idempotent."""


class Cublas(Blas):
    """The C interface: CuPy refuses to capture its own, which takes 12 us a call."""

    captured, compute = True, 68  # CUBLAS_COMPUTE_32F
    compute_int8 = 72  # CUBLAS_COMPUTE_32I

    def __init__(self, library: ctypes.CDLL, stream: int, workspace: Array) -> None:
        """The library of the current device, on `stream`. Without the `workspace`, a captured product would allocate
        memory in each replay."""
        super().__init__()
        self._library = library
        self._workspace = workspace
        self._handle = c_void_p()
        self._check("cublasCreate", library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._check("cublasSetStream", library.cublasSetStream_v2(self._handle, c_void_p(stream)))
        # Sums of parts of the columns stay in float32 where results are fp16.
        self._check("cublasSetMathMode", library.cublasSetMathMode(self._handle, _FLOAT_PARTS))
        self._given: bool | None = None
        self._give_workspace(True)
        self._gemm = library.cublasGemmEx
        matrix = (c_void_p, c_int, c_int)
        self._gemm.argtypes = (c_void_p, *(c_int,) * 5, c_void_p, *matrix, *matrix, c_void_p, *matrix, c_int, c_int)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """As above."""
        self._give_workspace(x.dtype != np.float16 or x.shape[0] * weight.shape[0] < MANY_RESULTS)
        super().gemm(x, weight, out)

    def _give_workspace(self, given: bool) -> None:
        # A call of the host, also while a graph is captured.
        if given == self._given:
            return
        at, size = c_void_p(self._workspace.data.ptr), c_size_t(self._workspace.nbytes if given else 0)
        self._check("cublasSetWorkspace", self._library.cublasSetWorkspace_v2(self._handle, at, size))
        self._given = given

    def _call(self, *arguments: int) -> None:
        self._check("cublasGemmEx", self._gemm(self._handle, *arguments))

    def _check(self, symbol: str, status: int) -> None:
        if status:
            raise DeviceError(f"{symbol} failed with status {status}")

    def close(self) -> None:
        if self._handle:
            self._library.cublasDestroy_v2(self._handle)
            self._handle = c_void_p()


class _Hipblas(Blas):
    """CuPy's interface, which knows the constants of the library's versions, with its handle for the current device and
    thread and its current stream."""

    captured, compute = False, 0  # a cudaDataType_t, which CuPy turns into the library's

    def __init__(self, library: Any, handle: Any) -> None:
        super().__init__()
        self._library = library
        self._handle = handle

    def _call(self, *arguments: int) -> None:
        self._library.gemmEx(self._handle(), *arguments)

    def close(self) -> None:
        """CuPy keeps its handles."""


def load(vendor: Vendor, stream: int, empty: Callable[[int], Array]) -> Blas | None:
    """The library that CuPy finds for the current device; None if none works. `empty` allocates an array of that many
    bytes on the device."""
    try:
        from cupy.cuda import cublas, device

        handle = device.get_cublas_handle()
    except (ImportError, RuntimeError):
        return None
    if vendor == "hip":
        return _Hipblas(cublas, device.get_cublas_handle)
    # The name finds the library that CuPy has loaded, wherever its file is.
    found = open_library((f"libcublas.so.{cublas.getVersion(handle) // 10000}",))
    return None if found is None else Cublas(found[0], stream, empty(WORKSPACE))
