"""A Device that runs the CUDA/HIP kernels on the CPU, with checks that a GPU does not make.

`launch` compiles kernels/<source>.cu with g++ against kernels/gpu_host.h into a shared library (emulated_build.py) and
runs it in emulator.cpp at once. It raises DeviceError with kernel, block, thread and source line for:

- an access outside of every array argument (also in the gaps between the rows of a strided view), a write through a
  const argument, a misaligned access, a read of memory that nothing was written to (shared, or of `Device.empty`);
- a race: two threads at one address, one of them writing, without a barrier between, also across blocks, and any
  access where a copy in the background may still be in flight;
- barriers and lane operations that not all threads reach, shuffles from lanes that do not exist;
- a thread that ends while a copy in the background may still read its block's shared memory, a block that ends before a
  box has come to its own;
- blocks of a cluster that send before they have met, or another number of bytes than their leader expects;
- a number posted to a slot that still holds one, or taken before it is posted (kernels/posts.h);
- a thread that ends without luce_await, and before luce_await a write to an array or a read of data that a kernel has
  written since the last copy from the host.

It does not see an access past one shared array into the next, nor an order that fences and flags in global memory
make. To debug a kernel, run the test under gdb and break on the kernel's name, or on `fail` in emulator.cpp.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime.device import Array, CopyStream, Device, DeviceName, Event, Memory, TensorMap
from luce.runtime.host import HostCopyStream, HostDevice, HostEvent
from tests.support.emulated_build import KERNELS, compile_source, emulator

# What one block gets on sm_90 (on sm_75 and all of AMD it is 64 KiB).
SHARED_LIMIT = 227 * 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_POISON = np.uint32(0x7FF17FF5)
#: what a thread did wrong, of the faults that name nothing else
_ENDINGS = {
    13: "the thread ended without luce_await",
    14: "the thread ended before a wait for what this copies from shared memory",
    15: "the thread sends to its cluster's leader before luce_cluster_arrive and luce_cluster_wait",
    16: "blocks of a cluster sent other bytes than their leader expects, or it did not wait for them",
    17: "the thread posts to a slot from which nobody has taken the number before",
    18: "the thread takes a number that no block before its own has posted",
    19: "the thread arrives at a gate, but did not share what it wrote to shared memory with products",
    20: "the block ended before this box had come to its shared memory",
}
#: one emulator exists in the process
_RUNNING = threading.Lock()


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("extent", ctypes.c_uint64),
        ("run", ctypes.c_uint64),
        ("dims", ctypes.c_uint64),
        ("stride", ctypes.c_uint64 * 4),
        ("count", ctypes.c_uint64 * 4),
        ("written", ctypes.c_uint64),
        ("constant", ctypes.c_uint64),
        ("granule", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_uint64),
        ("shared", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
        ("dynamic", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("lanes", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_uint32),
        ("access", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("site", ctypes.c_uint64),
        ("other_site", ctypes.c_uint64),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("other_block", ctypes.c_uint32),
    )


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char),
        ("pointer", ctypes.c_bool),
        ("constant", ctypes.c_bool),
        ("size", ctypes.c_uint32),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_uint32),
        ("bound", ctypes.c_uint32),
        ("call", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
    )


class DeviceArray(np.ndarray[Any, Any]):
    """An array in an emulated device's memory. What NumPy computes from one is one too, as with CuPy."""

    #: first address of the allocation that this array, or the one it was made from, lies in; its flag per byte: written
    origin: tuple[int, NDArray[np.uint8] | None] | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.origin = getattr(source, "origin", None)


class EmulatedDevice(Device):
    """One emulated GPU with 32 or 64 lanes. `kernels` is the folder of the sources and headers.

    `products` as in Device: with 32 lanes F16 and BF16, if not given.
    """

    kv_dtype = np.dtype(np.float16)
    host = False
    packed = True
    blas = True
    int8_gemm = True
    shared_limit = SHARED_LIMIT
    multiprocessors = 2
    maps_pinned = True

    def __init__(self, lanes: int = 32, kernels: Path = KERNELS, products: Iterable[str] | None = None) -> None:
        self.name = DeviceName("cuda" if lanes == 32 else "hip", 0)
        self.lanes = lanes
        self.products = frozenset(("F16", "BF16") if products is None and lanes == 32 else products or ())
        self.kernels = kernels
        self._libraries: dict[tuple[object, ...], _Library] = {}
        self._used = 0
        # 2 to 255, as emulator.cpp takes it.
        self._step = 2

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        return self._allocate(shape, dtype, written=False)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        array = self.empty(shape, dtype)
        self.write(array, np.zeros(array.shape, array.dtype))
        return array

    def upload(self, array: NDArray[Any]) -> Array:
        if isinstance(array, DeviceArray):
            raise DeviceError(f"{self.name}: upload of an array of this device")
        self._next_step()
        copy = self._allocate(array.shape, array.dtype, written=True)
        copy[...] = array
        return copy

    def download(self, array: Array) -> NDArray[Any]:
        if not isinstance(array, DeviceArray):
            raise DeviceError(f"{self.name}: download of {type(array).__name__}, which is not an array of this device")
        return np.array(array, subok=False)

    def write(self, array: Array, values: NDArray[Any]) -> None:
        self._next_step()
        if isinstance(values, DeviceArray):
            raise DeviceError(f"{self.name}: write of an array of this device")
        self._put("write", array, values)

    def _next_step(self) -> None:
        """Kernels queued before a copy from the host end before those behind it start."""
        self._step = 2 + (self._step - 1) % 254

    def copy(self, target: Array, source: Array) -> None:
        if not isinstance(source, DeviceArray) or not source.flags.c_contiguous:
            raise DeviceError(f"{self.name}: copy of {_type(source)}, which is no whole array of this device")
        self._put("copy", target, source)

    def _put(self, verb: str, target: Array, source: Array) -> None:
        """What a GPU, which copies bytes, is asked for."""
        alike = (target.shape, target.dtype) == (source.shape, source.dtype)
        if not isinstance(target, DeviceArray) or not target.flags.c_contiguous or not alike:
            shapes = [f"{_type(array)} {list(array.shape)}" for array in (source, target)]
            raise DeviceError(f"{self.name}: {verb} of {' to '.join(shapes)}")
        target[...] = source

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
        where = f"{kernel} of kernels/{source}.cu"
        key = (source, *(defines or {}).items())
        library = self._libraries.get(key)
        if library is None:
            macros = {**(defines or {}), "LUCE_WGMMA": int("WGMMA" in self.products)}
            library = self._libraries[key] = _Library(*compile_source(self.kernels, source, self.lanes, macros))
        grid3, block3 = _dimensions(where, grid, block)
        if not 0 <= shared <= SHARED_LIMIT:
            raise DeviceError(f"{where}: {shared} bytes of dynamic shared memory; a block has at most {SHARED_LIMIT}")
        library.run(where, kernel, self.lanes, self._step, grid3, block3, args, shared)

    def record(self, *, timing: bool = False) -> Event:
        return HostEvent()

    def wait_for(self, event: Event) -> None:
        event.wait()

    def copy_stream(self) -> CopyStream:
        return HostCopyStream()

    def pinned(self, size: int) -> NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def mapped(self, memory: NDArray[Any]) -> Array:
        return memory.view(DeviceArray)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        HostDevice().gemm(x, weight, out)
        base, flags = out.origin or (0, None)
        if flags is not None:
            # What the launches' checks know as written, for every row.
            for row in out:
                at = row.ctypes.data - base
                flags[at : at + row.nbytes] = 1

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        return HostDevice().memory()

    def describe(self) -> dict[str, str | int]:
        return {"name": f"emulated, {self.lanes} lanes", "memory": self.memory().total, "allocated": self._used}

    def close(self) -> None:
        self._libraries.clear()

    def _allocate(self, shape: int | Sequence[int], dtype: DTypeLike, *, written: bool) -> DeviceArray:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        # Small arrays are many, and asking for the free memory reads a file.
        if nbytes > 2**28 and nbytes > (free := self.memory().free):
            raise OutOfMemoryError(f"{self.name}: {nbytes} bytes asked, {free} bytes free")
        # 256 bytes, as the vendors' allocators align; the words past the end hold the pattern that emulator.cpp reads.
        memory = np.empty(nbytes + 256 + 8, np.uint8)
        start = -memory.ctypes.data % 256
        flags = None
        if not written:
            memory[start : start + (nbytes + 7) // 4 * 4].view(np.uint32)[...] = _POISON
            flags = np.zeros(nbytes + 8, np.uint8)
        array = memory[start : start + nbytes].view(dtype).reshape(shape).view(DeviceArray)
        array.origin = (memory.ctypes.data + start, flags)
        self._used += nbytes
        weakref.finalize(memory, self._release, nbytes)
        return array

    def _release(self, nbytes: int) -> None:
        self._used -= nbytes


def _dimensions(where: str, grid: tuple[int, ...], block: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for what, sizes in (("grid", grid), ("block", block)):
        if not 1 <= len(sizes) <= 3 or any(int(n) != n or n < 1 for n in sizes):
            raise DeviceError(f"{where}: {what} {sizes} is not one to three positive sizes")
    grid3, block3 = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    if block3[0] * block3[1] * block3[2] > 1024 or block3[2] > 64:
        raise DeviceError(f"{where}: block {block} has more than 1024 threads, or more than 64 in z")
    if any(n > most for n, most in zip(grid3, _MAX_GRID, strict=True)):
        raise DeviceError(f"{where}: grid {grid} exceeds {_MAX_GRID}")
    return grid3, block3


class _Library:
    """The kernels of one source with one set of defines."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.source = source
        self.library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.kernels: dict[str, tuple[_Kernel, list[str]]] = {}

    def kernel(self, where: str, name: str) -> tuple[_Kernel, list[str]]:
        """A kernel, and what messages call its arguments. Raises DeviceError if the source has none of that name."""
        if name not in self.kernels:
            try:
                describe = self.library[f"luce_kernel_{name}"]
            except AttributeError as error:
                raise DeviceError(f"{where}: no such kernel") from error
            describe.restype = _Kernel
            kernel = describe()
            self.kernels[name] = kernel, self._labels(name, kernel.count)
        return self.kernels[name]

    def run(
        self,
        where: str,
        name: str,
        lanes: int,
        step: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared: int,
    ) -> None:
        kernel, labels = self.kernel(where, name)
        if len(args) != kernel.count:
            raise DeviceError(f"{where}: {len(args)} arguments, the kernel has {kernel.count}")
        if block[0] * block[1] * block[2] > kernel.bound:
            raise DeviceError(f"{where}: block {block} has more threads than its __launch_bounds__({kernel.bound})")
        values: list[Any] = []
        regions: list[_Region] = []
        arrays: list[tuple[str, NDArray[Any]]] = []
        for i, arg in enumerate(args):
            parameter = kernel.parameters[i]
            if isinstance(arg, TensorMap):
                values.append(_tensor_map(f"{where}: {labels[i]}", parameter, arg))
            elif not parameter.pointer:
                values.append(_scalar(f"{where}: {labels[i]}", parameter, arg))
            elif arg is None:
                values.append(ctypes.c_void_p(0))
            else:
                regions += _region(f"{where}: {labels[i]}", parameter, arg)
                arrays.append((labels[i], arg))
                values.append(ctypes.c_void_p(arg.ctypes.data))
        pointers = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(v) for v in values))
        table = (_Region * (len(regions) + 1))(*regions)
        launch = _Launch(
            call=kernel.call,
            arguments=ctypes.addressof(pointers),
            regions=ctypes.addressof(table),
            region_count=len(regions),
            shared=kernel.shared,
            shared_end=kernel.shared_end,
            dynamic=shared,
            grid=grid,
            block=block,
            lanes=lanes,
            step=step,
        )
        report = _Report()
        with _RUNNING:
            failed = emulator().luce_host_run(ctypes.byref(launch), ctypes.byref(report))
        if failed:
            raise DeviceError(self._message(where, report, grid, block, arrays))

    def _labels(self, kernel: str, count: int) -> list[str]:
        """`argument 3 (eps)`: names come from the source, and are left out where macros hide them."""
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", self.source.read_text(encoding="utf-8"), flags=re.S)
        match = re.search(rf"\b{kernel}\s*\(([^()]*)\)\s*\{{", code)
        names = re.findall(r"(\w+)\s*(?:,|$)", match[1]) if match else []
        return [f"argument {i + 1}" + (f" ({names[i]})" if len(names) == count else "") for i in range(count)]

    def _message(
        self,
        where: str,
        report: _Report,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arrays: list[tuple[str, NDArray[Any]]],
    ) -> str:
        at = f"block {tuple(report.block)}, thread {_index(report.thread, block)}, {self._line(report.site)}"
        other = f"thread {_index(report.other_thread, block)}"
        access = ("read", "write", "atomic")[report.access] + f" of {report.size} bytes"
        match report.fault:
            case 1:
                what = f"{access} outside of all arrays ({_nearest(report.address, arrays)})"
            case 2:
                what = f"{access} in a const array ({_nearest(report.address, arrays)})"
            case 3:
                what = f"misaligned {access} ({_nearest(report.address, arrays)})"
            case 4:
                what = f"{access} that nothing was written to ({_nearest(report.address, arrays)})"
            case 5:
                what = f"{access} of shared memory that nothing was written to; a barrier before it may be missing"
            case 6:
                blocks = _index(report.other_block, grid)
                what = f"{access} races with block {blocks}, {other} ({_nearest(report.address, arrays)})"
            case 7:
                what = f"{access} of shared memory races with {other}: no barrier between them"
            case 8:
                what = f"divergent barrier: {other} {self._elsewhere(report.other_site)}"
            case 9:
                what = f"divergent lanes: {other} {self._elsewhere(report.other_site)}"
            case 10:
                what = f"shuffle from lane {ctypes.c_int64(report.size).value}, which does not exist"
            case 11:
                what = "shuffle or vote in a wave that lacks threads: the block is not a whole number of waves"
            case 12:
                what = f"{access} before luce_await ({_nearest(report.address, arrays)})"
            case fault:
                what = _ENDINGS[fault]
        return f"{where}: {at}: {what}"

    def _elsewhere(self, site: int | None) -> str:
        return f"is at {self._line(site)}" if site else "has ended"

    def _line(self, site: int) -> str:
        """`norm.cu:41`, and for code in inlined helpers `reduce.h:23 from norm.cu:41`."""
        reply = subprocess.run(
            ("addr2line", "-i", "-e", str(self.path), hex(site - 1)), capture_output=True, text=True, check=True
        )
        places = [re.sub(r" \(discriminator \d+\)$", "", Path(line).name) for line in reply.stdout.splitlines()]
        shown = [p for p in places if not p.startswith("gpu_host.h:")] or places
        return " from ".join(shown)


def _scalar(where: str, parameter: _Parameter, arg: Any) -> Any:
    """A ctypes object that holds the argument's bytes."""
    dtype = _dtype(parameter)
    if dtype is None or not isinstance(arg, np.generic) or arg.dtype != dtype:
        raise DeviceError(f"{where} is {_type(arg)}, the kernel takes {dtype or 'what is no number'}")
    return ctypes.create_string_buffer(arg.tobytes())


def _tensor_map(where: str, parameter: _Parameter, arg: TensorMap) -> Any:
    """TensorMap of kernels/tensor_map.h. Its array must be another argument too."""
    array = arg.array
    if parameter.pointer or parameter.size != 128:
        raise DeviceError(f"{where} is a TensorMap, the kernel takes something else")
    if not isinstance(array, DeviceArray) or array.ndim != 3 or array.itemsize != 2 or not array.flags.c_contiguous:
        raise DeviceError(f"{where} is a TensorMap of {_type(array)}, not of 16-bit numbers in three dimensions")
    values = struct.pack("@PqqiiI92x", array.ctypes.data, *array.strides[:2], *array.shape[1:], arg.rows)
    memory = ctypes.create_string_buffer(len(values) + 64)
    made = (ctypes.c_char * len(values)).from_buffer(memory, -ctypes.addressof(memory) % 64)
    made.raw = values
    return made


def _region(where: str, parameter: _Parameter, arg: Any) -> list[_Region]:
    """The bytes that a pointer argument allows: one region, or none for an empty array."""
    if not isinstance(arg, DeviceArray):
        raise DeviceError(f"{where} is {_type(arg)}, not an array of this device")
    dtype = _dtype(parameter)
    if dtype is not None and arg.dtype != dtype and dtype != np.uint8:
        raise DeviceError(f"{where} has dtype {arg.dtype}, the kernel takes {dtype}")
    if not parameter.constant and not arg.flags.writeable:
        raise DeviceError(f"{where} is read-only, the kernel may write to it")
    if arg.size == 0:
        return []
    axes = sorted(((s, n) for s, n in zip(arg.strides, arg.shape, strict=True) if n > 1), reverse=True)
    run = arg.itemsize
    while axes and axes[-1][0] == run:
        run *= axes.pop()[1]
    # What is left are rows of `run` bytes with gaps between; each axis must contain the ones inside it.
    inside = run
    for stride, count in reversed(axes):
        if stride < inside:
            raise DeviceError(f"{where} has strides {arg.strides} for shape {arg.shape}: they overlap or run back")
        inside = stride * (count - 1) + inside
    if len(axes) > 4:
        raise DeviceError(f"{where} has more than 4 axes with gaps")
    base = arg.ctypes.data
    start, flags = arg.origin or (0, None)
    region = _Region(base=base, extent=inside, run=run, dims=len(axes), constant=parameter.constant)
    region.granule = min(4, parameter.size) if parameter.kind in b"fiuhgb" else 1
    for d, (stride, count) in enumerate(axes):
        region.stride[d], region.count[d] = stride, count
    # The result of a NumPy expression has its operand's origin but memory of its own, which is written.
    if flags is not None and start <= base < start + len(flags):
        region.written = flags.ctypes.data + base - start
    return [region]


def _dtype(parameter: _Parameter) -> np.dtype[Any] | None:
    """The only dtype that a parameter takes; None if any will do (void, structs, vector types)."""
    kind = {b"h": "f", b"g": "u"}.get(parameter.kind, parameter.kind.decode())
    return np.dtype(f"{kind}{parameter.size}") if kind in "fiub" else None


def _type(arg: Any) -> str:
    return f"{type(arg).__name__} of {arg.dtype}" if isinstance(arg, np.ndarray) else type(arg).__name__


def _index(linear: int, sizes: Sequence[int]) -> tuple[int, int, int]:
    return linear % sizes[0], linear // sizes[0] % sizes[1], linear // (sizes[0] * sizes[1])


def _nearest(address: int, arrays: list[tuple[str, NDArray[Any]]]) -> str:
    """The array argument that an address is in or next to, and where."""
    best: tuple[int, str] = (2**64, "the kernel has no arrays")
    for label, array in arrays:
        low, high = np.lib.array_utils.byte_bounds(array)
        offset = address - low
        distance = max(-offset, address - high + 1, 0)
        if distance < best[0]:
            best = (distance, f"byte {offset} of {label}: {array.dtype} {list(array.shape)}, {high - low} bytes")
    return best[1]
