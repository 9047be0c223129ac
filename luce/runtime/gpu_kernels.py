"""Kernels of a GPU (luce.runtime.gpu): compiled or taken from the cache, loaded, and ready to be launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from luce.errors import DeviceError
from luce.runtime import compiler
from luce.runtime.compiler import RuntimeCompiler
from luce.runtime.device import DeviceName, TensorMap
from luce.runtime.driver import TENSOR_MAP, Driver, Properties
from luce.runtime.kernels import KernelBuild

# Dynamic shared memory that every kernel gets without asking, in bytes: CUDA's 48 KiB but for a kernel's static arrays,
# which count among them and are smaller than the rest.
_DEFAULT_SHARED = 40 * 1024
# Kernels that are compiled side by side.
_COMPILERS = 8
# The types of kernel parameters besides arrays, in the struct module's formats.
_FORMATS: dict[type, str] = {np.int32: "i", np.int64: "q", np.float32: "f", TensorMap: TENSOR_MAP}


class LoadedKernel:
    """A loaded kernel and the dynamic shared memory it may use."""

    __slots__ = ("arrays", "at", "launch", "maps", "shared")

    def __init__(self, driver: Driver, at: int, args: Sequence[Any], array_type: type, *, early: bool) -> None:
        """`at` is the driver's handle. `args` are those of any launch, since all launches pass the same types."""
        self.at = at
        self.arrays = [i for i, arg in enumerate(args) if type(arg) not in _FORMATS]
        self.maps = [i for i, arg in enumerate(args) if type(arg) is TensorMap]
        for i in self.arrays:
            if not isinstance(args[i], array_type | None):
                raise DeviceError(f"argument {i + 1} is {type(args[i]).__name__}")
        self.launch = driver.launcher(at, [_FORMATS.get(type(arg), "P") for arg in args], early=early)
        self.shared = _DEFAULT_SHARED


class KernelLoader:
    """The modules of one GPU. The device is current on the calling thread."""

    def __init__(
        self, name: DeviceName, driver: Driver, properties: Properties, rtc: RuntimeCompiler, cupy: Any
    ) -> None:
        self._name = name
        self._driver = driver
        self.compiler = rtc
        self._cupy = cupy
        self._arch, self._lanes = properties.arch, properties.lanes
        # Whether kernels start before the ones ahead have ended, and wait in luce_await (kernels/gpu.h).
        self._early = driver.starts_early(self._arch)
        self._failures = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)
        self._modules: dict[KernelBuild, Any] = {}

    def loaded(self, build: KernelBuild) -> bool:
        """Whether `load` has loaded this build."""
        return build in self._modules

    def load(self, build: KernelBuild) -> None:
        """Compile a build, or fetch it from the cache, and load it. Raises DeviceError naming the build."""
        if build in self._modules:
            return
        code = self._code(build)
        module = self._cupy.cuda.function.Module()
        try:
            module.load(code)
        except self._failures as error:
            raise DeviceError(f"{self._name}: {build}: {error}") from error
        self._modules[build] = module

    def compile(self, builds: Iterable[KernelBuild], on_built: Callable[[int], None] = lambda done: None) -> None:
        """Compile builds side by side into the cache; `on_built` gets how many are done. `load` names the ones that
        fail."""

        def attempt(build: KernelBuild) -> None:
            with contextlib.suppress(DeviceError):
                self._code(build)

        with ThreadPoolExecutor(_COMPILERS) as threads:
            for done, _ in enumerate(threads.map(attempt, builds), 1):
                on_built(done)

    def kernel(
        self, source: str, kernel: str, defines: Mapping[str, int | str] | None, args: Sequence[Any]
    ) -> LoadedKernel:
        """One kernel, for launches with arguments of these types. Raises DeviceError naming source and kernel."""
        build = KernelBuild.of(source, defines)
        self.load(build)
        try:
            at = self._modules[build].get_function(kernel).ptr
            return LoadedKernel(self._driver, at, args, self._cupy.ndarray, early=self._early)
        except (DeviceError, *self._failures) as error:
            raise DeviceError(f"{self._name}: {build}: {kernel}: {error}") from error

    def close(self) -> None:
        """Unload all modules."""
        self._modules.clear()

    def _code(self, build: KernelBuild) -> bytes:
        return compiler.cached(self.compiler, build, self._arch, self._lanes)
