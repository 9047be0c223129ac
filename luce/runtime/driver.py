"""The few driver calls that CuPy does not offer or that must work without it, in one table for CUDA and HIP.

For CUDA these are calls of the driver API (libcuda), which every driver installs; CuPy links the runtime API
statically, so there is no library of it to share. Both APIs use the device's primary context, so streams, graphs and
pointers pass freely between this module and CuPy. HIP has one API for both, whose names mostly differ in the prefix
alone.

An absent vendor library is no error: `load` returns None.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from luce.errors import DeviceError
from luce.runtime.device import Memory
from luce.runtime.library import open_library

Vendor = Literal["cuda", "hip"]

# Status codes, equal for both vendors, of a machine without a device and without a usable kernel module
# (hipErrorInsufficientDriver and its CUDA runtime twin).
_ABSENT = (100, 35)

#: names of each vendor's driver library, the preferred one first
LIBRARIES: dict[Vendor, tuple[str, ...]] = {
    "cuda": ("libcuda.so.1",),
    "hip": ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
}
# Where ROCm installs itself outside the loader's path.
_FOLDERS: dict[Vendor, tuple[str, ...]] = {"cuda": (), "hip": ("/opt/rocm/lib",)}

#: product that provides the driver, its device file, advice on access to that file, program that lists devices
SIGNS: dict[Vendor, tuple[str, str, str, str]] = {
    "cuda": ("NVIDIA's driver", "/dev/nvidiactl", "see its owner and mode", "nvidia-smi"),
    "hip": ("ROCm (amdgpu and hip-runtime-amd)", "/dev/kfd", "add it to the groups render and video", "rocminfo"),
}

#: call: symbol in libcuda (without "cu"), symbol in libamdhip64 (without "hip"), argument types where they are equal
CALLS: dict[str, tuple[str, str, tuple[Any, ...] | None]] = {
    "driver_version": ("DriverGetVersion", "DriverGetVersion", (POINTER(c_int),)),
    "device_count": ("DeviceGetCount", "GetDeviceCount", (POINTER(c_int),)),
    "device_name": ("DeviceGetName", "DeviceGetName", (c_char_p, c_int, c_int)),
    "device_memory": ("DeviceTotalMem_v2", "DeviceTotalMem", (POINTER(c_size_t), c_int)),
    "device_attribute": ("DeviceGetAttribute", "DeviceGetAttribute", (POINTER(c_int), c_int, c_int)),
    "memory_info": ("MemGetInfo_v2", "MemGetInfo", (POINTER(c_size_t), POINTER(c_size_t))),
    "host_register": ("MemHostRegister_v2", "HostRegister", (c_void_p, c_size_t, c_uint)),
    "host_unregister": ("MemHostUnregister", "HostUnregister", (c_void_p,)),
    "can_access_peer": ("DeviceCanAccessPeer", "DeviceCanAccessPeer", (POINTER(c_int), c_int, c_int)),
    "function_attribute": ("FuncSetAttribute", "FuncSetAttribute", (c_void_p, c_int, c_int)),
    "capture_begin": ("StreamBeginCapture_v2", "StreamBeginCapture", (c_void_p, c_int)),
    "capture_end": ("StreamEndCapture", "StreamEndCapture", (c_void_p, POINTER(c_void_p))),
    "graph_destroy": ("GraphDestroy", "GraphDestroy", (c_void_p,)),
    "graph_instantiate": (
        "GraphInstantiateWithFlags",
        "GraphInstantiateWithFlags",
        (POINTER(c_void_p), c_void_p, c_ulonglong),
    ),
    "graph_exec_destroy": ("GraphExecDestroy", "GraphExecDestroy", (c_void_p,)),
    "graph_launch": ("GraphLaunch", "GraphLaunch", (c_void_p, c_void_p)),
    "kernel_launch": ("LaunchKernelEx", "ModuleLaunchKernel", None),
}
# The arguments of kernel_launch: configuration or grid, block, shared memory and stream; parameters, and none packed.
_LAUNCH: dict[Vendor, tuple[Any, ...]] = {
    "cuda": (c_void_p,) * 4,
    "hip": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
}

#: attribute: CUdevice_attribute, hipDeviceAttribute_t (the same numbers in ROCm 5, 6 and 7)
ATTRIBUTES = {
    "lanes": (10, 87),
    "shared": (8, 74),
    "shared_optin": (97, 75),
    "multiprocessors": (16, 63),
    "major": (75, 23),
    "minor": (76, 61),
}

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP, hipHostRegisterMapped
_SAME_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_RELAXED = 2  # capture mode: neither calls of other threads nor allocations break a capture
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, hipFuncAttribute...
_PEER_ENABLED = 704  # access was enabled before
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# Arguments of cuTensorMapEncodeTiled: map, type, dimensions, address, sizes and strides, box and its steps,
# interleaving, permutation, what is fetched to the second-level cache, what is read outside.
_ENCODE = (c_void_p, c_int, c_uint, c_void_p, *(POINTER(c_ulonglong),) * 2, *(POINTER(c_uint),) * 2, *(c_int,) * 4)
# CU_TENSOR_MAP_DATA_TYPE_UINT16, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_128B, _FLOAT_OOB_FILL_NONE (zeros)
_UINT16, _BOXES = 1, (0, 3, 2, 0)
_BOX_COLUMNS = 64
_MAP_ALIGNMENT = 64
#: the struct module's format of a CUtensorMap
TENSOR_MAP = "128s"
# CUlaunchConfig: grid, block, shared memory, stream, attributes and their number. CUlaunchAttribute: id, and a value.
_CONFIG, _ATTRIBUTE = struct.Struct("@7IPPI"), struct.Struct("@I4xI60x")


@dataclass(frozen=True)
class Properties:
    """Facts about a device."""

    name: str
    #: the compiler's target: `sm_90a`, `gfx90a:sramecc+:xnack-`
    arch: str
    lanes: int
    #: bytes of shared memory of a block, by default and at most
    shared: int
    shared_optin: int
    multiprocessors: int
    #: bytes
    memory: int


class Driver:
    """One vendor's driver library, loaded. Every method raises DeviceError naming call and device where it fails.

    A device must be made current (`use`) on a thread before the calls that name no device.
    """

    def __init__(self, vendor: Vendor, library: ctypes.CDLL, path: str) -> None:
        self.vendor = vendor
        self.path = path
        prefix, column = ("cu", 0) if vendor == "cuda" else ("hip", 1)
        self._column = column
        self.library = library
        self.functions: dict[str, tuple[str, Callable[..., int]]] = {}
        for call, (*symbols, arguments) in CALLS.items():
            symbol = prefix + str(symbols[column])
            function = getattr(library, symbol, None)
            if function is not None:
                function.argtypes, function.restype = arguments or _LAUNCH[vendor], c_int
                self.functions[call] = symbol, function
        self._contexts: dict[int, c_void_p] = {}

    def entry(self, call: str) -> tuple[str, Callable[..., int]]:
        """A call's symbol and function."""
        if call not in self.functions:
            raise DeviceError(f"{self.path} is too old: it has no call for {call}")
        return self.functions[call]

    def check(self, symbol: str, status: int) -> None:
        """Raise DeviceError unless the status of a call says success."""
        if status:
            raise DeviceError(f"{self.vendor}: {symbol}: {self.error(status)}")

    def _status(self, call: str, *arguments: Any) -> int:
        return self.entry(call)[1](*arguments)

    def _call(self, call: str, *arguments: Any) -> None:
        symbol, function = self.entry(call)
        self.check(symbol, function(*arguments))

    def _read(self, call: str, kind: Any, *arguments: Any) -> Any:
        """The value that a call writes through its first argument."""
        value = kind()
        self._call(call, byref(value), *arguments)
        return value.value

    def error(self, status: int) -> str:
        """The driver's text for a status code."""
        text = c_char_p()
        if self.vendor == "cuda":
            self.library.cuGetErrorString(status, byref(text))
        else:
            self.library.hipGetErrorString.restype = c_char_p
            text.value = self.library.hipGetErrorString(status)
        return f"{(text.value or b'unknown error').decode()} ({status})"

    @property
    def version(self) -> str:
        """Newest CUDA version that the driver runs, or the HIP version, as major.minor[.patch]."""
        number = self._read("driver_version", c_int)
        if self.vendor == "cuda":
            return f"{number // 1000}.{number % 1000 // 10}"
        return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"

    def count(self) -> int:
        """Number of devices; 0 if the library is installed without a device or a kernel module."""
        value = c_int()
        # HIP initialises itself, and hipInit returns "invalid device" on a machine without one.
        status = self.library.cuInit(0) if self.vendor == "cuda" else 0
        if status == 0:
            status = self._status("device_count", byref(value))
        if status in _ABSENT:
            return 0
        self.check("device count", status)
        return value.value

    def properties(self, index: int) -> Properties:
        """Facts about one device."""

        def attribute(name: str) -> int:
            number = ATTRIBUTES[name][self._column]
            return int(self._read("device_attribute", c_int, number, index))

        name = ctypes.create_string_buffer(256)
        self._call("device_name", name, 256, index)
        shared = attribute("shared")
        return Properties(
            name=name.value.decode(errors="replace"),
            arch=cuda_arch(attribute("major"), attribute("minor")) if self.vendor == "cuda" else self._hip_arch(index),
            lanes=attribute("lanes"),
            shared=shared,
            # HIP returns 0: a block gets all shared memory without opting in.
            shared_optin=max(shared, attribute("shared_optin")),
            multiprocessors=attribute("multiprocessors"),
            memory=self._read("device_memory", c_size_t, index),
        )

    def _hip_arch(self, index: int) -> str:
        """gcnArchName. Its place in the structure differs between ROCm 5, 6 and 7, its spelling does not."""
        buffer = ctypes.create_string_buffer(8192)
        get = getattr(self.library, "hipGetDevicePropertiesR0600", None) or self.library.hipGetDeviceProperties
        self.check("hipGetDeviceProperties", get(buffer, c_int(index)))
        found = re.search(rb"gfx[0-9a-f]+(:[a-z]+[+-])*", buffer.raw)
        if found is None:
            raise DeviceError(f"hip:{index}: {self.path} names no architecture")
        return found.group().decode()

    def use(self, index: int) -> None:
        """Make a device's primary context current on this thread."""
        if self.vendor == "hip":
            self.check("hipSetDevice", self.library.hipSetDevice(c_int(index)))
            return
        self.check("cuCtxSetCurrent", self.library.cuCtxSetCurrent(self._primary(index)))

    def _primary(self, index: int) -> c_void_p:
        """The context that CuPy's runtime API uses as well. It is retained once, until the process ends."""
        if index not in self._contexts:
            context = c_void_p()
            self.check("cuDevicePrimaryCtxRetain", self.library.cuDevicePrimaryCtxRetain(byref(context), c_int(index)))
            self._contexts[index] = context
        return self._contexts[index]

    def memory(self) -> Memory:
        """Free and total bytes of the current device, as all processes on it see them."""
        free, total = c_size_t(), c_size_t()
        self._call("memory_info", byref(free), byref(total))
        return Memory(free.value, total.value)

    def register_host(self, address: int, size: int) -> None:
        """Pin a range of host memory (such as shared memory) for all devices of this vendor, and their kernels."""
        self._call("host_register", address, size, _PORTABLE | _MAPPED)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        self._call("host_unregister", address)

    def enable_peer(self, index: int, peer: int) -> bool:
        """Let device `index` read and write the memory of `peer`; False where the hardware cannot."""
        if not self._read("can_access_peer", c_int, index, peer):
            return False
        self.use(index)
        if self.vendor == "cuda":
            symbol = "cuCtxEnablePeerAccess"
            status = self.library.cuCtxEnablePeerAccess(self._primary(peer), c_uint(0))
        else:
            symbol = "hipDeviceEnablePeerAccess"
            status = self.library.hipDeviceEnablePeerAccess(c_int(peer), c_uint(0))
        if status != _PEER_ENABLED:
            self.check(symbol, status)
        return True

    def allow_shared(self, function: int, size: int) -> None:
        """Allow a kernel `size` bytes of dynamic shared memory, beyond the 48 KiB that CUDA gives by default."""
        self._call("function_attribute", function, _DYNAMIC_SHARED, size)

    def maps_registered(self, index: int) -> bool:
        """Whether kernels of a device find registered memory at the host's address. It is not asked of HIP, on which
        that has not been tried."""
        return self.vendor == "cuda" and bool(self._read("device_attribute", c_int, _SAME_POINTERS, index))

    @property
    def uses_flags(self) -> bool:
        """Whether `wait_flag` and `write_flag` can be called: HIP requires memory that no other process sees."""
        return self.vendor == "cuda" and hasattr(self.library, "cuStreamWaitValue32_v2")

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        """Let the stream's later work wait until a uint32 counter in pinned memory has reached a value (cyclically)."""
        status = self.library.cuStreamWaitValue32_v2(c_void_p(stream), c_ulonglong(address), c_uint(value), c_uint(0))
        self.check("cuStreamWaitValue32", status)

    def write_flag(self, stream: int, address: int, value: int) -> None:
        """Write a uint32 in pinned memory when the stream has done all work queued so far."""
        status = self.library.cuStreamWriteValue32_v2(c_void_p(stream), c_ulonglong(address), c_uint(value), c_uint(0))
        self.check("cuStreamWriteValue32", status)

    def begin_capture(self, stream: int) -> None:
        """Collect the stream's work into a graph instead of running it."""
        self._call("capture_begin", stream, _RELAXED)

    def end_capture(self, stream: int) -> int:
        """The captured work as an executable graph; free it with `destroy_graph`."""
        graph, executable = c_void_p(), c_void_p()
        self._call("capture_end", stream, byref(graph))
        try:
            self._call("graph_instantiate", byref(executable), graph, 0)
        finally:
            self._call("graph_destroy", graph)
        return int(executable.value or 0)

    def starts_early(self, arch: str) -> bool:
        """Whether kernels can start before earlier ones end, also in graphs (programmatic dependent launch): on `sm_90`
        and later, from CUDA 12.3 on."""
        if self.vendor != "cuda" or capability(arch) < 90:
            return False
        return tuple(map(int, self.version.split(".")[:2])) >= (12, 3)

    def tensor_map(self, address: int, shape: tuple[int, ...], rows: int) -> bytes:
        """A CUtensorMap of 16-bit numbers [rows, heads, columns] at `address`: boxes of `rows` rows of a head and 64
        columns, in which products of four waves find their rows (kernels/tensor_map.h)."""
        size = struct.calcsize(TENSOR_MAP)
        memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT)
        skip = -ctypes.addressof(memory) % _MAP_ALIGNMENT
        sizes = (c_ulonglong * 3)(*reversed(shape))
        strides = (c_ulonglong * 2)(2 * shape[2], 2 * shape[2] * shape[1])
        box, steps = (c_uint * 3)(_BOX_COLUMNS, 1, rows), (c_uint * 3)(1, 1, 1)
        encode = self.library.cuTensorMapEncodeTiled
        encode.argtypes = _ENCODE
        at = ctypes.addressof(memory) + skip
        self.check("cuTensorMapEncodeTiled", encode(at, _UINT16, 3, address, sizes, strides, box, steps, *_BOXES))
        return memory.raw[skip : skip + size]

    def launcher(self, function: int, formats: Sequence[str], *, early: bool) -> Launcher:
        """A launcher of a kernel whose parameters have `formats` of the struct module.

        With `early` its blocks may start before the previous kernel ends, and wait for that in luce_await; only where
        `starts_early` is true.
        """
        return Launcher(self, function, formats, early)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Queue an executable graph."""
        self._call("graph_launch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Release an executable graph."""
        self._call("graph_exec_destroy", graph)


class Launcher:
    """Launches one kernel repeatedly, with structures laid out once. Not thread-safe."""

    def __init__(self, driver: Driver, function: int, formats: Sequence[str], early: bool) -> None:
        self._driver = driver
        self._function = function
        self._symbol, self._launch = driver.entry("kernel_launch")
        parameters = struct.Struct("@" + "".join(formats))
        self._pack = parameters.pack_into
        self._values = ctypes.create_string_buffer(max(1, parameters.size))
        # A count of zero aligns, and takes no bytes.
        offsets = [struct.calcsize(f"@{''.join(formats[:i])}0{format[-1]}") for i, format in enumerate(formats)]
        at = ctypes.addressof(self._values)
        self._pointers = (c_void_p * (len(formats) + 1))(*(at + offset for offset in offsets))
        self._parameters = ctypes.addressof(self._pointers)
        self._attribute = ctypes.create_string_buffer(_ATTRIBUTE.pack(_PROGRAMMATIC, 1))
        self._attributes = (ctypes.addressof(self._attribute), 1) if early else (0, 0)
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._config_at = ctypes.addressof(self._config)

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], shared: int, stream: int, values: Sequence[int | float | bytes]
    ) -> None:
        """Queue the kernel: grid and block of three sizes each, bytes of dynamic shared memory, the parameters' values
        (addresses for pointers, bytes for maps). Raises struct.error if their number is not that of the parameters."""
        self._pack(self._values, 0, *values)
        if self._driver.vendor == "cuda":
            _CONFIG.pack_into(self._config, 0, *grid, *block, shared, stream, *self._attributes)
            status = self._launch(self._config_at, self._function, self._parameters, None)
        else:
            status = self._launch(self._function, *grid, *block, shared, stream, self._parameters, None)
        self._driver.check(self._symbol, status)


def cuda_arch(major: int, minor: int) -> str:
    """The compiler target of a compute capability. `a` adds the instructions of that architecture alone (wgmma)."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def capability(arch: str) -> int:
    """90 of `sm_90a`."""
    return int(arch.strip("sm_a"))


@cache
def load(vendor: Vendor) -> Driver | None:
    """A vendor's driver, or None if its library is not installed."""
    return open_driver(vendor, LIBRARIES[vendor])


def open_driver(vendor: Vendor, names: tuple[str, ...]) -> Driver | None:
    """The first of a vendor's libraries that loads, or None. `load` opens the installed one, once."""
    found = open_library(names, _FOLDERS[vendor])
    return None if found is None else Driver(vendor, *found)


def absence(vendor: Vendor) -> str:
    """Why this machine has no devices of a vendor, and how to fix that."""
    product, node, group, tool = SIGNS[vendor]
    found = load(vendor)
    if found is None:
        return f"{LIBRARIES[vendor][0]} is not found: install {product}"
    if not Path(node).exists():
        return (
            f"{found.path} is there, but not {node}: load the kernel driver of {product}, or pass it to the container"
        )
    if not os.access(node, os.R_OK | os.W_OK):
        return f"this user may not open {node}: {group}"
    return f"{found.path} reports no device: see the output of {tool}"
