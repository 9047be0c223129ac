"""An emulated device that captures: a graph is a list of launches, issued again as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import DeviceError
from luce.runtime.device import Array, Graph
from tests.support.emulated import EmulatedDevice


class _Launches:
    def __init__(self, device: CapturingDevice) -> None:
        self._device = device
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = []

    def launch(self) -> None:
        self._device.launched += 1
        self._device.overwrite(self)
        for call, positional, named in self.calls:
            call(self._device, *positional, **named)


class CapturingDevice(EmulatedDevice):
    """Scalars, grids and addresses of a captured launch stay what they were. `refuses`: capturing fails."""

    captures = True

    def __init__(self, lanes: int = 32, *, refuses: bool = False) -> None:
        super().__init__(lanes)
        self.refuses = refuses
        #: graphs captured, and launches of graphs
        self.captured = self.launched = 0
        self._graph: _Launches | None = None

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        if self.refuses:
            raise DeviceError(f"{self.name}: captures nothing today")
        self.captured += 1
        self._graph = graph = _Launches(self)
        try:
            return graph, work()
        finally:
            self._graph = None

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
        if self._graph is None:
            super().launch(source, kernel, grid, block, args, defines=defines, shared=shared)
        else:
            positional, named = (source, kernel, grid, block, args), {"defines": defines, "shared": shared}
            self._graph.calls.append((EmulatedDevice.launch, positional, named))

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        if self._graph is None:
            super().gemm(x, weight, out)
        else:
            self._graph.calls.append((EmulatedDevice.gemm, (x, weight, out), {}))

    def call_host(self, work: Callable[..., None], *arrays: Array) -> None:
        if self._graph is None:
            super().call_host(work, *arrays)
        else:
            self._graph.calls.append((lambda device: work(*arrays), (), {}))

    def upload(self, array: NDArray[Any]) -> Array:
        self._refuse("upload")
        return super().upload(array)

    def write(self, array: Array, values: NDArray[Any]) -> None:
        self._refuse("write")
        super().write(array, values)

    def copy(self, target: Array, source: Array) -> None:
        self._refuse("copy")
        super().copy(target, source)

    def download(self, array: Array) -> NDArray[Any]:
        self._refuse("download")
        return super().download(array)

    def synchronize(self) -> None:
        self._refuse("synchronize")
        super().synchronize()

    def overwrite(self, graph: _Launches | None) -> None:
        """A graph is going to run: here all have memory of their own."""

    def _refuse(self, what: str) -> None:
        if self._graph is not None:
            raise DeviceError(f"{self.name}: {what} in a capture")


class SharingDevice(CapturingDevice):
    """Graphs share their memory, as those of GPUs may: what one allocated is garbage once another one runs, or is
    captured. Copies to the host are queued as they are asked for, and see what was there then."""

    def __init__(self, lanes: int = 32) -> None:
        super().__init__(lanes)
        self._made: list[tuple[_Launches, Array]] = []

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        array = super().empty(shape, dtype)
        if self._graph is not None:
            self._made.append((self._graph, array))
        return array

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Graph, tuple[Array, ...]]:
        self.overwrite(None)
        return super().capture(work)

    def overwrite(self, graph: _Launches | None) -> None:
        """Another graph uses the memory."""
        for owner, array in self._made:
            if owner is not graph:
                array.view(np.ndarray).view(np.uint8)[...] = 0xA5

    def fetch(self, array: Array, to: NDArray[Any] | None = None) -> Callable[[], NDArray[Any]]:
        now = super().fetch(array, to)()
        return lambda: now
