"""Events and copy streams of a GPU (luce.runtime.gpu), on CuPy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from luce.runtime.device import Array, CopyStream, Event


class StreamOwner(Protocol):
    """The interface of GpuDevice for its events and streams."""

    #: the module cupy
    cupy: Any

    def activate(self) -> None:
        """Make device and stream current on this thread. Raises DeviceError if the device is closed."""

    def failing(self, what: str) -> AbstractContextManager[None]:
        """A context in which failures of the vendor's runtime become DeviceError; `what` failed."""

    def mark(self, stream: Any, timing: bool) -> Event:
        """An event that is done when a stream of this device has done all that is queued there."""

    def hold(self, stream: Any, event: Event) -> None:
        """Let a stream of this device wait for an event."""


class GpuEvent(Event):
    """An event of the vendor's runtime."""

    __slots__ = ("_device", "event")

    def __init__(self, device: StreamOwner, event: Any) -> None:
        self._device = device
        self.event = event

    def done(self) -> bool:
        with self._device.failing("event"):
            return bool(self.event.done)

    def wait(self) -> None:
        with self._device.failing("event"):
            self.event.synchronize()

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, GpuEvent)
        return float(self._device.cupy.cuda.get_elapsed_time(start.event, self.event)) / 1000


class GpuCopyStream(CopyStream):
    """A stream beside the device's own."""

    def __init__(self, device: StreamOwner) -> None:
        self._device = device
        self._stream = device.cupy.cuda.Stream(non_blocking=True)
        runtime = device.cupy.cuda.runtime
        self._copy, self._copy_rows, self._kind = runtime.memcpyAsync, runtime.memcpy2DAsync, runtime.memcpyDefault

    def wait_for(self, event: Event) -> None:
        self._device.hold(self._stream, event)

    def copy(self, target: Array, source: Array) -> None:
        device = self._device
        device.activate()
        at, start, stream = _address(target), _address(source), self._stream.ptr
        with device.failing(f"copy of {target.nbytes} bytes"):
            if source.flags.c_contiguous:
                self._copy(at, start, target.nbytes, self._kind, stream)
            else:
                rows = len(target)
                width = target.nbytes // rows
                self._copy_rows(at, width, start, source.strides[0], width, rows, self._kind, stream)

    def record(self, *, timing: bool = False) -> Event:
        return self._device.mark(self._stream, timing)


def _address(array: Array) -> int:
    """The address of an array, on a device or on the host."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
