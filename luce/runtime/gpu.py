"""The Device interface on CuPy: CUDA and HIP.

CuPy owns arrays and launches; the module's code comes from our own compiler cache (compiler.py), facts about the device
from the driver (driver.py). CuPy is imported when the first device is made, so that Luce runs without it.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime import blas, compiler, driver
from luce.runtime.device import Array, CopyStream, Device, DeviceName, Event, Flag, Graph, Memory
from luce.runtime.driver import Vendor
from luce.runtime.graph import DriverGraph
from luce.runtime.kernels import KernelBuild
from luce.runtime.pinned import PinnedPool
from luce.runtime.staging import Stager

#: Dynamic shared memory that every kernel gets without asking, in bytes.
_UNASKED_SHARED = 48 * 1024
# Downloads of so many bytes go to pinned memory: 1 MB of logits takes 0.3 ms to pageable memory. Larger ones would keep
# much of the host's memory pinned, as CuPy's pool never gives it back.
_PINNED = range(1 << 16, (1 << 24) + 1)
# Arrays that `load` reads in the background, in bytes.
_STAGED = 1 << 20
# Kernels that are compiled side by side.
_COMPILERS = 8
_EXTRAS: dict[Vendor, str] = {
    "cuda": "luce-llm[cuda13] (or luce-llm[cuda12] for older drivers)",
    "hip": "luce-llm[rocm]",
}


# What the parameters of kernels may be, besides arrays, in the struct module's letters.
_SCALARS: dict[type, str] = {np.int32: "i", np.int64: "q", np.float32: "f"}


class _Function:
    """A loaded kernel and the dynamic shared memory it may use."""

    __slots__ = ("arrays", "at", "launch", "shared")

    def __init__(self, device: GpuDevice, at: int, args: Sequence[Any]) -> None:
        """`at` is the driver's handle, `args` those of any launch: all have the same types."""
        self.at = at
        self.arrays = [i for i, arg in enumerate(args) if type(arg) not in _SCALARS]
        for i in self.arrays:
            if not isinstance(args[i], device.array_type | None):
                raise DeviceError(f"argument {i + 1} is {type(args[i]).__name__}")
        format = "".join(_SCALARS.get(type(arg), "P") for arg in args)
        self.launch = device.driver.launcher(at, format, early=device.early)
        self.shared = _UNASKED_SHARED


class GpuEvent(Event):
    """An event of the vendor's run time."""

    __slots__ = ("_device", "event")

    def __init__(self, device: GpuDevice, event: Any) -> None:
        self._device = device
        self.event = event

    def done(self) -> bool:
        with self._device._failing("event"):
            return bool(self.event.done)

    def wait(self) -> None:
        with self._device._failing("event"):
            self.event.synchronize()

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, GpuEvent)
        return float(self._device._cupy.cuda.get_elapsed_time(start.event, self.event)) / 1000


class GpuCopyStream(CopyStream):
    """A stream beside the device's own."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._stream = device._cupy.cuda.Stream(non_blocking=True)
        runtime = device._cupy.cuda.runtime
        self._copy, self._copy_rows, self._kind = runtime.memcpyAsync, runtime.memcpy2DAsync, runtime.memcpyDefault

    def wait_for(self, event: Event) -> None:
        self._device.hold(self._stream, event)

    def copy(self, target: Array, source: Array) -> None:
        device = self._device
        device._activate()
        at, start, stream = _address(target), _address(source), self._stream.ptr
        with device._failing(f"copy of {target.nbytes} bytes"):
            if source.flags.c_contiguous:
                self._copy(at, start, target.nbytes, self._kind, stream)
            else:
                rows = len(target)
                width = target.nbytes // rows
                self._copy_rows(at, width, start, source.strides[0], width, rows, self._kind, stream)

    def record(self, *, timing: bool = False) -> Event:
        return self._device.mark(self._stream, timing)


class GpuDevice(Device):
    """One CUDA or HIP device with a stream of its own. Every method makes device and stream current on its thread."""

    host = False
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
        self.uses_flags = found.uses_flags
        self.products = _products(self.properties.arch) if kind == "cuda" else frozenset()
        #: whether kernels start before the ones ahead have ended, and wait by luce_await (kernels/gpu.h)
        self.early = found.starts_early(self.properties.arch)
        newest = int(found.version.split(".")[0]) if kind == "cuda" else None
        self._cupy = _import_cupy(self.name, kind)
        rtc = compiler.load(kind, newest)
        if rtc is None:
            raise DeviceError(f"{self.name}: no run-time compiler found: install {_EXTRAS[kind]}")
        self._compiler = rtc
        cuda = self._cupy.cuda
        self.array_type: type = self._cupy.ndarray
        self._failures = (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)
        self._out_of_memory = cuda.memory.OutOfMemoryError
        self._modules: dict[KernelBuild, Any] = {}
        self._functions: dict[tuple[Any, ...], _Function] = {}
        self._closed = False
        self._select = cuda.runtime.setDevice
        self._select(index)
        self._stream = cuda.Stream(non_blocking=True)
        # What captured graphs write to: arrays of eager steps never lie here.
        self._arena = cuda.MemoryPool()
        self._stager: Stager | None = None
        self._pinned = PinnedPool(self.pin)
        self._warming: dict[KernelBuild, None] | None = None
        self._blas = blas.load(kind, self.stream, lambda size: self.empty(size, np.uint8))
        self.blas = self._blas is not None
        self.captures_gemm = self._blas is None or self._blas.captured

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
        if copy.nbytes:
            self.write(copy, array)
        return copy

    def load(self, array: NDArray[Any], to: Array | None = None) -> Array:
        if array.nbytes < _STAGED or not array.flags.c_contiguous:
            return super().load(array, to)
        copy = self.empty(array.shape, array.dtype) if to is None else to
        if self._stager is None:
            self._stager = Stager(self._cupy, self.name.index, self._stream)
        self._stager.copy(copy.data.ptr, array)
        return copy

    def _settle(self) -> None:
        """Let what is queued from now on come after what `load` was given."""
        if self._stager is not None:
            stager, self._stager = self._stager, None
            try:
                stager.finish()
            except self._failures as error:
                raise DeviceError(f"{self.name}: copy to the device: {error}") from error

    def write(self, array: Array, values: NDArray[Any]) -> None:
        self._activate()
        contiguous = np.ascontiguousarray(values)
        try:
            array.data.copy_from_host_async(contiguous.ctypes.data, array.nbytes, self._stream)
        except self._failures as error:
            raise DeviceError(f"{self.name}: copy of {array.nbytes} bytes to the device: {error}") from error

    def copy(self, target: Array, source: Array) -> None:
        self._activate()
        with self._failing(f"copy of {target.nbytes} bytes"):
            target.data.copy_from_device_async(source.data, target.nbytes, self._stream)

    def download(self, array: Array) -> NDArray[Any]:
        self._activate()
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
        self._activate()
        self._settle()
        with self._failing(f"copy of {array.nbytes} bytes from the device"):
            out = self._pinned_like(array) if to is None else to
            array.get(out=out, blocking=False)
        copied = self.record()

        def wait() -> NDArray[Any]:
            copied.wait()
            return out

        return wait

    def _pinned_like(self, array: Array) -> NDArray[Any]:
        """Pinned memory for a copy of an array, from the library's pool of small pieces."""
        memory = self._cupy.cuda.alloc_pinned_memory(array.nbytes)
        out: NDArray[Any] = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape)
        return out

    def set_flag(self, flag: Flag) -> None:
        if not self.uses_flags:
            super().set_flag(flag)
            return
        self._activate()
        self._driver.use(self.name.index)
        self._driver.write_flag(self.stream, flag.memory.ctypes.data, flag.value)

    def prepare(self, build: KernelBuild) -> None:
        """Compile a build, or fetch it from the cache, and load it. Raises DeviceError naming the build."""
        self._activate()
        if build in self._modules:
            return
        code = self._code(build)
        module = self._cupy.cuda.function.Module()
        try:
            module.load(code)
        except self._failures as error:
            raise DeviceError(f"{self.name}: {build}: {error}") from error
        self._modules[build] = module

    def warm_up(self, work: Callable[[], object]) -> None:
        """As in the interface. A BLAS library's products do run, which makes the library ready."""
        self._activate()
        builds: dict[KernelBuild, None] = {}
        self._warming = builds
        try:
            work()
        finally:
            self._warming = None
        self.compile(builds)
        for build in builds:
            self.prepare(build)

    def compile(self, builds: Iterable[KernelBuild]) -> None:
        """Compile builds side by side into the cache. `prepare` names the ones that fail."""

        def attempt(build: KernelBuild) -> None:
            with contextlib.suppress(DeviceError):
                self._code(build)

        with ThreadPoolExecutor(_COMPILERS) as threads:
            list(threads.map(attempt, builds))

    def _code(self, build: KernelBuild) -> bytes:
        return compiler.cached(self._compiler, build, self.properties.arch, self.lanes)

    def _function(
        self, source: str, kernel: str, defines: Mapping[str, int | str] | None, args: Sequence[Any]
    ) -> _Function:
        build = KernelBuild.of(source, defines)
        self.prepare(build)
        try:
            return _Function(self, self._modules[build].get_function(kernel).ptr, args)
        except (DeviceError, *self._failures) as error:
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
        if self._warming is not None:
            build = KernelBuild.of(source, defines)
            if build not in self._modules:
                self._warming[build] = None
            return
        if self._stager is not None:
            self._settle()
        key = (source, kernel, *defines.items()) if defines else (source, kernel)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._function(source, kernel, defines, args)
        values = list(args)
        try:
            for i in function.arrays:
                values[i] = 0 if values[i] is None else values[i].data.ptr
            if shared > function.shared:
                self._driver.allow_shared(function.at, shared)
                function.shared = shared
            function.launch((*grid, 1, 1)[:3], (*block, 1, 1)[:3], shared, self.stream, values)
        except (AttributeError, TypeError, struct.error, DeviceError) as error:
            raise DeviceError(f"{self.name}: kernels/{source}.cu: {kernel}: {error}") from error

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        self._activate()
        graph = DriverGraph(self._driver, self.stream)
        try:
            with self._cupy.cuda.using_allocator(self._arena.malloc), graph.capturing():
                arrays = work()
        # NotImplementedError is how CuPy refuses what it cannot capture, library calls among them.
        except (NotImplementedError, *self._failures) as error:
            raise DeviceError(f"{self.name}: capture: {error}") from error
        return graph, tuple(map(self._lent, arrays))

    def _lent(self, array: Array) -> Array:
        """The same array, without a claim to its memory."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(array.data.ptr, array.nbytes, self._arena, self.name.index)
        return self._cupy.ndarray(array.shape, array.dtype, cuda.MemoryPointer(memory, 0), array.strides)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Failures of the vendor's run time as DeviceError."""
        try:
            yield
        except self._failures as error:
            raise DeviceError(f"{self.name}: {what}: {error}") from error

    def mark(self, stream: Any, timing: bool) -> GpuEvent:
        """The moment when a stream of this device has done all that is queued there."""
        self._activate()
        with self._failing("event"):
            event = self._cupy.cuda.Event(disable_timing=not timing)
            event.record(stream)
        return GpuEvent(self, event)

    def hold(self, stream: Any, event: Event) -> None:
        """Let a stream of this device wait for an event."""
        self._activate()
        if isinstance(event, Flag) and self.uses_flags:
            self._driver.use(self.name.index)
            self._driver.wait_flag(stream.ptr, event.memory.ctypes.data, event.value)
            return
        if not isinstance(event, GpuEvent):
            event.wait()
            return
        with self._failing("event"):
            stream.wait_event(event.event)

    def record(self, *, timing: bool = False) -> Event:
        return self.mark(self._stream, timing)

    def wait_for(self, event: Event) -> None:
        self.hold(self._stream, event)

    def copy_stream(self) -> CopyStream:
        self._activate()
        return GpuCopyStream(self)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self._activate()
        return self._pinned.take(size)

    def reserve_pinned(self, size: int) -> None:
        self._pinned.reserve(size)

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        self._activate()
        self._driver.use(self.name.index)
        address = memory.ctypes.data
        self._driver.register_host(address, memory.nbytes)
        return lambda: self._driver.unregister_host(address)

    def reaches(self, other: Device) -> bool:
        """As in the interface; both directions are opened, and tried: some boards grant access and deliver garbage."""
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
        self._activate()
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
        self._activate()
        self._settle()
        with self._failing("synchronise"):
            self._stream.synchronize()

    def memory(self) -> Memory:
        """Free counts what CuPy's pool holds unused as well: it serves the next arrays."""
        self._activate()
        self._driver.use(self.name.index)
        device, cached = self._driver.memory(), self._cupy.get_default_memory_pool().free_bytes()
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
            "compiler": self._compiler.version,
            "cupy": self._cupy.__version__,
        }

    def close(self) -> None:
        if self._closed:
            return
        self._activate()
        self._settle()
        self._pinned.close()
        if self._blas is not None:
            self._blas.close()
            self._blas = None
        self._functions.clear()
        self._modules.clear()
        self._arena.free_all_blocks()
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._closed = True


def _products(arch: str) -> frozenset[str]:
    """What a CUDA architecture has in hardware: halves since Turing, bfloat16 since Ampere, groups on Hopper alone."""
    groups = ("WGMMA",) if arch == "sm_90a" else ()
    return frozenset(("F16", "BF16", *groups) if driver.capability(arch) >= 80 else ("F16",))


def _address(array: Array) -> int:
    """Where an array begins, on a device or on the host."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def cupy_vendor() -> Vendor | None:
    """The vendor whose GPUs this environment's CuPy drives, None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    return "hip" if cupy.cuda.runtime.is_hip else "cuda"


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
