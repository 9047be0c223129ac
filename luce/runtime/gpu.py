"""The Device interface on CuPy: CUDA and HIP.

CuPy owns arrays and launches; the module's code comes from our own compiler cache (compiler.py), facts about the device
from the driver (driver.py). CuPy is imported when the first device is made, so that Luce runs without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime import blas, compiler, driver
from luce.runtime.device import Array, Device, DeviceName, Memory
from luce.runtime.driver import Vendor
from luce.runtime.kernels import KernelBuild

#: Dynamic shared memory that every kernel gets without asking, in bytes.
_UNASKED_SHARED = 48 * 1024
_EXTRAS: dict[Vendor, str] = {
    "cuda": "luce-llm[cuda13] (or luce-llm[cuda12] for older drivers)",
    "hip": "luce-llm[rocm]",
}


class _Function:
    """A loaded kernel and the dynamic shared memory it may use."""

    __slots__ = ("call", "shared")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.shared = _UNASKED_SHARED


class GpuDevice(Device):
    """One CUDA or HIP device with a stream of its own. Every method makes device and stream current on its thread."""

    host = False
    kv_dtype = np.dtype(np.float16)

    def __init__(self, kind: Vendor, index: int) -> None:
        """Raises DeviceError if the driver, the device, CuPy or the run-time compiler is missing."""
        self.name = DeviceName(kind, index)
        found = driver.load(kind)
        count = 0 if found is None else found.count()
        if found is None or index >= count:
            raise DeviceError(f"{self.name}: no such device; {kind} devices found: {count}")
        self._driver = found
        self.properties = found.properties(index)
        self.lanes = self.properties.lanes
        newest = int(found.version.split(".")[0]) if kind == "cuda" else None
        self._cupy = _import_cupy(self.name, kind)
        rtc = compiler.load(kind, newest)
        if rtc is None:
            raise DeviceError(f"{self.name}: no run-time compiler found: install {_EXTRAS[kind]}")
        self._compiler = rtc
        cuda = self._cupy.cuda
        self._failures = (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)
        self._out_of_memory = cuda.memory.OutOfMemoryError
        self._modules: dict[KernelBuild, Any] = {}
        self._functions: dict[tuple[Any, ...], _Function] = {}
        self._closed = False
        self._select = cuda.runtime.setDevice
        self._select(index)
        self._stream = cuda.Stream(non_blocking=True)
        self._blas = blas.load(kind)
        self.blas = self._blas is not None

    @property
    def stream(self) -> int:
        """The driver's handle of this device's stream, for events and graphs (driver.py)."""
        return int(self._stream.ptr)

    @property
    def driver(self) -> driver.Driver:
        """The vendor's driver."""
        return self._driver

    def _activate(self) -> None:
        if self._closed:
            raise DeviceError(f"{self.name} is closed")
        self._select(self.name.index)
        self._stream.use()

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        self._activate()
        try:
            return self._cupy.empty(shape, dtype)
        except self._out_of_memory as error:
            asked = math.prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
            free = self.memory().free
            raise OutOfMemoryError(f"{self.name}: {asked} bytes asked, {free} bytes free") from error

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        array = self.empty(shape, dtype)
        if array.nbytes:
            array.data.memset_async(0, array.nbytes, self._stream)
        return array

    def upload(self, array: NDArray[Any]) -> Array:
        """As in the interface. Pageable memory is read before this returns, pinned memory until `synchronize`."""
        copy = self.empty(array.shape, array.dtype)
        if not copy.nbytes:
            return copy
        contiguous = np.ascontiguousarray(array)
        try:
            copy.data.copy_from_host_async(contiguous.ctypes.data, copy.nbytes, self._stream)
        except self._failures as error:
            raise DeviceError(f"{self.name}: copy of {array.nbytes} bytes to the device: {error}") from error
        return copy

    def download(self, array: Array) -> NDArray[Any]:
        self._activate()
        try:
            result: NDArray[Any] = array.get()
        except self._failures as error:
            raise DeviceError(f"{self.name}: copy of {array.nbytes} bytes from the device: {error}") from error
        return result

    def prepare(self, build: KernelBuild) -> None:
        """Compile a build, or fetch it from the cache, and load it. Raises DeviceError naming the build."""
        self._activate()
        if build in self._modules:
            return
        code = compiler.cached(self._compiler, build, self.properties.arch, self.lanes)
        module = self._cupy.cuda.function.Module()
        try:
            module.load(code)
        except self._failures as error:
            raise DeviceError(f"{self.name}: {build}: {error}") from error
        self._modules[build] = module

    def _function(self, source: str, kernel: str, defines: Mapping[str, int | str] | None) -> _Function:
        build = KernelBuild.of(source, defines)
        self.prepare(build)
        try:
            return _Function(self._modules[build].get_function(kernel))
        except self._failures as error:
            raise DeviceError(f"{self.name}: {build}: {kernel}: {error}") from error

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        defines: Mapping[str, int | str] | None = None,
        shared: int = 0,
    ) -> None:
        self._activate()
        key = (source, kernel, *defines.items()) if defines else (source, kernel)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._function(source, kernel, defines)
        try:
            if shared > function.shared:
                self._driver.allow_shared(function.call.ptr, shared)
                function.shared = shared
            function.call(grid, block, args, shared_mem=shared)
        except (TypeError, DeviceError, *self._failures) as error:
            raise DeviceError(f"{self.name}: kernels/{source}.cu: {kernel}: {error}") from error

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        self._activate()
        if self._blas is None:
            raise DeviceError(f"{self.name}: no BLAS library found")
        try:
            self._blas.gemm(x, weight, out)
        except (RuntimeError, ValueError, *self._failures) as error:
            shape = f"{list(x.shape)} times {list(weight.shape)}"
            raise DeviceError(f"{self.name}: product of {shape}: {error}") from error

    def synchronize(self) -> None:
        self._activate()
        try:
            self._stream.synchronize()
        except self._failures as error:
            raise DeviceError(f"{self.name}: {error}") from error

    def memory(self) -> Memory:
        """Free counts what CuPy's pool holds unused as well: it serves the next arrays."""
        self._activate()
        self._driver.use(self.name.index)
        device = self._driver.memory()
        return Memory(device.free + self._cupy.get_default_memory_pool().free_bytes(), device.total)

    def describe(self) -> dict[str, str | int]:
        facts = self.properties
        return {
            "name": facts.name,
            "arch": facts.arch,
            "lanes": facts.lanes,
            "multiprocessors": facts.multiprocessors,
            "memory": facts.memory,
            "shared memory per block": facts.shared,
            "shared memory per block, opted in": facts.shared_optin,
            "driver": self._driver.version,
            "compiler": self._compiler.version,
            "cupy": self._cupy.__version__,
        }

    def close(self) -> None:
        if self._closed:
            return
        self._activate()
        self._functions.clear()
        self._modules.clear()
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._closed = True


def _import_cupy(name: DeviceName, kind: Vendor) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"{name} needs CuPy: install {_EXTRAS[kind]}") from error
    if cupy.cuda.runtime.is_hip != (kind == "hip"):
        other = "HIP" if kind == "cuda" else "CUDA"
        raise DeviceError(
            f"{name}: the CuPy of this environment is for {other}: install {_EXTRAS[kind]} in another one"
        )
    return cupy
