"""The Device interface on CuPy: CUDA and HIP.

CuPy owns arrays, streams and modules. The code of modules comes from the project's compiler cache (compiler.py), facts
about the device and launches from the driver (driver.py). CuPy is imported with the first device, so that Luce runs
without it.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime import blas, compiler, driver
from luce.runtime.cupy_module import EXTRAS, import_cupy
from luce.runtime.device import (
    Array,
    CopyStream,
    Device,
    DeviceName,
    Event,
    Fetched,
    Flag,
    Graph,
    Memory,
    Readable,
)
from luce.runtime.driver import Vendor
from luce.runtime.gpu_kernels import KernelLoader, LoadedKernel
from luce.runtime.gpu_stream import GpuCopyStream, GpuEvent
from luce.runtime.graph import DriverGraph
from luce.runtime.kernels import KernelBuild
from luce.runtime.pinned import PinnedPool
from luce.runtime.staging import Stager

# Downloads of these sizes in bytes go to pinned memory: 1 MB of logits takes 0.3 ms to pageable memory. Larger ones
# would leave much of the host's memory pinned, as CuPy's pool never returns it.
_PINNED = range(1 << 16, (1 << 24) + 1)
# Least bytes of the arrays that `load` reads in the background.
_STAGED = 1 << 20


class GpuDevice(Device):
    """One CUDA or HIP device with a stream of its own. Every method makes device and stream current on its thread."""

    host = False
    packed = True
    captures = True
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
        self.shared_limit = self.properties.shared_optin
        self.multiprocessors = self.properties.multiprocessors
        self.uses_flags = found.uses_flags
        self.maps_pinned = found.uses_flags and found.maps_registered(index)
        self.products = _products(self.properties.arch) if kind == "cuda" else frozenset()
        newest = int(found.version.split(".")[0]) if kind == "cuda" else None
        self.cupy = import_cupy(self.name, kind)
        rtc = compiler.load(kind, newest)
        if rtc is None:
            raise DeviceError(f"{self.name}: no run-time compiler found: install {EXTRAS[kind]}")
        self._loader = KernelLoader(self.name, found, self.properties, rtc, self.cupy)
        cuda = self.cupy.cuda
        self._failures = (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)
        self._out_of_memory = cuda.memory.OutOfMemoryError
        self._functions: dict[tuple[Any, ...], LoadedKernel] = {}
        self._closed = False
        self._select = cuda.runtime.setDevice
        self._select(index)
        self._stream = cuda.Stream(non_blocking=True)
        # What captured graphs write to: arrays of eager steps never lie here.
        self._arena = cuda.MemoryPool()
        self._stager: Stager | None = None
        self._pinned = PinnedPool(self.pin)
        self._warming: dict[KernelBuild, None] | None = None
        self._capturing: DriverGraph | None = None
        chosen = self.multiprocessors if "WGMMA" in self.products else 0
        self._blas = blas.load(kind, self.stream, lambda size: self.empty(size, np.uint8), chosen)
        self.blas = self._blas is not None
        # Turing and later have instructions for both.
        self.int8_gemm = self._blas is not None and self._blas.int8 and "F16" in self.products
        self.captures_gemm = self._blas is None or self._blas.captured

    @property
    def stream(self) -> int:
        """The driver's handle of this device's stream, for events and graphs (driver.py)."""
        return int(self._stream.ptr)

    @property
    def driver(self) -> driver.Driver:
        """The vendor's driver."""
        return self._driver

    def activate(self) -> None:
        """Make device and stream current on this thread. Raises DeviceError if the device is closed."""
        if self._closed:
            raise DeviceError(f"{self.name} is closed")
        self._select(self.name.index)
        self._stream.use()

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        self.activate()
        try:
            return self.cupy.empty(shape, dtype)
        except self._out_of_memory as error:
            asked = math.prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
            free = self.memory().free
            raise OutOfMemoryError(f"{self.name}: {asked} bytes asked, {free} bytes free") from error

    def reserve(self, size: int) -> None:
        # The pool cuts later arrays from a free piece. An allocation of the driver takes 0.5 ms (H100), however large:
        # 0.35 s for the 900 arrays of a model of 64 layers.
        with contextlib.suppress(OutOfMemoryError):
            self.empty(size, np.uint8)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        array = self.empty(shape, dtype)
        if array.nbytes:
            array.data.memset_async(0, array.nbytes, self._stream)
        return array

    def upload(self, array: NDArray[Any]) -> Array:
        """Reads pageable memory before it returns, pinned memory until `synchronize`."""
        copy = self.empty(array.shape, array.dtype)
        if copy.nbytes:
            self.write(copy, array)
        return copy

    def load(self, array: NDArray[Any] | Readable, to: Array | None = None) -> Array:
        if array.nbytes < _STAGED or (isinstance(array, np.ndarray) and not array.flags.c_contiguous):
            return super().load(array, to)
        copy = self.empty(array.shape, array.dtype) if to is None else to
        if self._stager is None:
            self._stager = Stager(self.cupy, self.name.index, self._stream)
        self._stager.copy(copy.data.ptr, array)
        return copy

    def _settle(self) -> None:
        """Let work queued from now on run after the copies of `load`."""
        if self._stager is not None:
            stager, self._stager = self._stager, None
            try:
                stager.finish()
            except self._failures as error:
                raise DeviceError(f"{self.name}: copy to the device: {error}") from error

    def write(self, array: Array, values: NDArray[Any]) -> None:
        self.activate()
        contiguous = np.ascontiguousarray(values)
        try:
            array.data.copy_from_host_async(contiguous.ctypes.data, array.nbytes, self._stream)
        except self._failures as error:
            raise DeviceError(f"{self.name}: copy of {array.nbytes} bytes to the device: {error}") from error

    def copy(self, target: Array, source: Array) -> None:
        self.activate()
        with self.failing(f"copy of {target.nbytes} bytes"):
            target.data.copy_from_device_async(source.data, target.nbytes, self._stream)

    def download(self, array: Array) -> NDArray[Any]:
        self.activate()
        self._settle()
        if not array.nbytes:
            return np.empty(array.shape, array.dtype)
        out = None
        try:
            if array.nbytes in _PINNED:
                out = self._pinned_like(array)
            result: NDArray[Any] = array.get(out=out)
        except self._failures as error:
            raise DeviceError(f"{self.name}: copy of {array.nbytes} bytes from the device: {error}") from error
        return result

    def fetch(self, array: Array, to: NDArray[Any] | None = None) -> Callable[[], NDArray[Any]]:
        if not array.nbytes or (to is None and array.nbytes >= _PINNED.stop):
            # What is queued from now on may overwrite the array.
            copy = self.download(array)
            return lambda: copy
        self.activate()
        self._settle()
        with self.failing(f"copy of {array.nbytes} bytes from the device"):
            out = self._pinned_like(array) if to is None else to
            array.get(out=out, blocking=False)
        return Fetched(out, self.record())

    def _pinned_like(self, array: Array) -> NDArray[Any]:
        """Pinned memory for a copy of an array, from CuPy's pool for small arrays."""
        memory = self.cupy.cuda.alloc_pinned_memory(array.nbytes)
        out: NDArray[Any] = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape)
        return out

    def set_flag(self, flag: Flag) -> None:
        if not self.uses_flags:
            super().set_flag(flag)
            return
        self.activate()
        self._driver.use(self.name.index)
        self._driver.write_flag(self.stream, flag.memory.ctypes.data, flag.value)

    def warm_up(self, work: Callable[[], object]) -> None:
        """Products of the BLAS library do run, which also loads the library's kernels."""
        self.activate()
        builds: dict[KernelBuild, None] = {}
        self._warming = builds
        try:
            work()
        finally:
            self._warming = None
        self.compile(builds)
        for build in builds:
            self.prepare(build)

    def compile(self, builds: Iterable[KernelBuild], on_built: Callable[[int], None] = lambda done: None) -> None:
        """Compile builds side by side into the cache; `on_built` gets how many are done. `prepare` names the ones that
        fail."""
        self._loader.compile(builds, on_built)

    def prepare(self, build: KernelBuild) -> None:
        """Load a build, compiled before or now. Raises DeviceError naming the build."""
        self.activate()
        self._loader.load(build)

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
        self.activate()
        if self._warming is not None:
            build = KernelBuild.of(source, defines)
            if not self._loader.loaded(build):
                self._warming[build] = None
            return
        if self._stager is not None:
            self._settle()
        key = (source, kernel, *defines.items()) if defines else (source, kernel)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._loader.kernel(source, kernel, defines, args)
        values = list(args)
        try:
            for i in function.arrays:
                values[i] = 0 if values[i] is None else values[i].data.ptr
            for i in function.maps:
                array = values[i].array
                values[i] = self._driver.tensor_map(array.data.ptr, array.shape, values[i].rows)
            if shared > function.shared:
                self._driver.allow_shared(function.at, shared)
                function.shared = shared
            function.launch((*grid, 1, 1)[:3], (*block, 1, 1)[:3], shared, self.stream, values)
        except (AttributeError, TypeError, struct.error, DeviceError) as error:
            raise DeviceError(f"{self.name}: kernels/{source}.cu: {kernel}: {error}") from error

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        self.activate()
        graph = self._capturing = DriverGraph(self._driver, self.stream)
        try:
            with self.cupy.cuda.using_allocator(self._arena.malloc), graph.capturing():
                arrays = work()
        # NotImplementedError is how CuPy refuses what it cannot capture, library calls among them.
        except (NotImplementedError, *self._failures) as error:
            raise DeviceError(f"{self.name}: capture: {error}") from error
        finally:
            self._capturing = None
        return graph, tuple(map(self._lent, arrays))

    def call_host(self, work: Callable[..., None], *arrays: Array) -> None:
        if self._warming is not None:
            return
        if self._capturing is None:
            work(*arrays)
        else:
            # Later parts of the graph use the memory of arrays that nothing reads any more.
            self._capturing.cut(partial(work, *map(self._lent, arrays)))

    def _lent(self, array: Array) -> Array:
        """The same array, without ownership of its memory."""
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(array.data.ptr, array.nbytes, self._arena, self.name.index)
        return self.cupy.ndarray(array.shape, array.dtype, cuda.MemoryPointer(memory, 0), array.strides)

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """A context in which failures of the vendor's runtime become DeviceError; `what` failed."""
        try:
            yield
        except self._failures as error:
            raise DeviceError(f"{self.name}: {what}: {error}") from error

    def mark(self, stream: Any, timing: bool) -> GpuEvent:
        """An event that is done when a stream of this device has done all work queued so far."""
        self.activate()
        with self.failing("event"):
            event = self.cupy.cuda.Event(disable_timing=not timing)
            event.record(stream)
        return GpuEvent(self, event)

    def hold(self, stream: Any, event: Event) -> None:
        """Let a stream of this device wait for an event."""
        self.activate()
        if isinstance(event, Flag) and self.uses_flags:
            self._driver.use(self.name.index)
            self._driver.wait_flag(stream.ptr, event.memory.ctypes.data, event.value)
            return
        if not isinstance(event, GpuEvent):
            event.wait()
            return
        with self.failing("event"):
            stream.wait_event(event.event)

    def record(self, *, timing: bool = False) -> Event:
        return self.mark(self._stream, timing)

    def wait_for(self, event: Event) -> None:
        self.hold(self._stream, event)

    def copy_stream(self) -> CopyStream:
        self.activate()
        return GpuCopyStream(self)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self.activate()
        return self._pinned.take(size)

    def reserve_pinned(self, size: int) -> None:
        self._pinned.reserve(size)

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        self.activate()
        self._driver.use(self.name.index)
        address = memory.ctypes.data
        self._driver.register_host(address, memory.nbytes)
        return lambda: self._driver.unregister_host(address)

    def mapped(self, memory: NDArray[Any]) -> Array:
        cuda = self.cupy.cuda
        owned = cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, self.name.index)
        return self.cupy.ndarray(memory.shape, memory.dtype, cuda.MemoryPointer(owned, 0))

    def reaches(self, other: Device) -> bool:
        """Enables and tests both directions: some boards grant access but deliver garbage."""
        if not isinstance(other, GpuDevice) or other.name.kind != self.name.kind:
            return False
        here, there = self.name.index, other.name.index
        if here == there:
            return True
        try:
            if not (self._driver.enable_peer(here, there) and self._driver.enable_peer(there, here)):
                return False
            return self._delivers(other)
        except DeviceError:
            return False

    def _delivers(self, other: GpuDevice) -> bool:
        sent = np.random.default_rng(0).integers(0, 256, (1024, 4096), np.uint8)
        source, target, stream = self.upload(sent), other.zeros(sent.shape, np.uint8), self.copy_stream()
        stream.wait_for(other.record())
        stream.wait_for(self.record())
        stream.copy(target, source)
        stream.record().wait()
        return bool((other.download(target) == sent).all())

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        self.activate()
        if self._blas is None:
            raise DeviceError(f"{self.name}: no BLAS library found")
        if self._warming is None:
            self._settle()
        try:
            self._blas.gemm(x, weight, out)
        except (RuntimeError, ValueError, DeviceError, *self._failures) as error:
            shape = f"{list(x.shape)} times {list(weight.shape)}"
            raise DeviceError(f"{self.name}: product of {shape}: {error}") from error

    def synchronize(self) -> None:
        self.activate()
        self._settle()
        with self.failing("synchronise"):
            self._stream.synchronize()

    def memory(self) -> Memory:
        """`free` includes the unused memory in CuPy's pool, which serves the next arrays."""
        self.activate()
        self._driver.use(self.name.index)
        device, cached = self._driver.memory(), self.cupy.get_default_memory_pool().free_bytes()
        return Memory(device.free + cached, device.total, cached)

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
            "compiler": self._loader.compiler.version,
            "cupy": self.cupy.__version__,
        }

    def close(self) -> None:
        if self._closed:
            return
        self.activate()
        self._settle()
        self._pinned.close()
        if self._blas is not None:
            self._blas.close()
            self._blas = None
        self._functions.clear()
        self._loader.close()
        self._arena.free_all_blocks()
        self.cupy.get_default_memory_pool().free_all_blocks()
        self._closed = True


def _products(arch: str) -> frozenset[str]:
    """Matrix instructions of a CUDA architecture: fp16 since Turing, bfloat16 since Ampere, wgmma on Hopper alone."""
    groups = ("WGMMA",) if arch == "sm_90a" else ()
    return frozenset(("F16", "BF16", *groups) if driver.capability(arch) >= 80 else ("F16",))
