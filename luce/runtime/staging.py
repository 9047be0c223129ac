"""Large arrays to a GPU in the background: several threads read them into pinned memory, the stream takes them away.

One thread copies a mapped file at 10 GB/s, the bus of an H200 takes 54: eight threads with two buffers of 4 MiB each
reach 52, with buffers of 2 MiB 40. Of a file that is not in memory they read 1.9 GB/s; asking the kernel for each part
ahead of time (MADV_WILLNEED) made it 1.7.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

_THREADS = 8
_CHUNK = 4 << 20


class Stager:
    """Copies to one device on one stream of it. `cupy` is the module."""

    def __init__(self, cupy: Any, index: int, stream: Any) -> None:
        self._cuda = cupy.cuda
        self._stream = stream
        self._threads = ThreadPoolExecutor(
            _THREADS, "luce-load", initializer=cupy.cuda.runtime.setDevice, initargs=(index,)
        )
        self._local = threading.local()
        self._copies: list[Future[None]] = []

    def copy(self, address: int, source: NDArray[Any]) -> None:
        """Copy a contiguous array to the device's memory at `address`; both must stay until `finish`."""
        raw = source.reshape(-1).view(np.uint8)
        for at in range(0, len(raw), _CHUNK):
            self._copies.append(self._threads.submit(self._move, address + at, raw[at : at + _CHUNK]))

    def finish(self) -> None:
        """Wait until all is there, and release threads and buffers. Raises what a copy raised."""
        try:
            for copy in self._copies:
                copy.result()
        finally:
            # The buffers go back to a pool with their threads: nothing may be reading them then.
            self._stream.synchronize()
            self._threads.shutdown(cancel_futures=True)

    def _move(self, address: int, source: NDArray[np.uint8]) -> None:
        memory, buffer, event = self._buffers()
        event.synchronize()
        np.copyto(buffer[: len(source)], source)
        runtime = self._cuda.runtime
        runtime.memcpyAsync(address, memory.ptr, len(source), runtime.memcpyHostToDevice, self._stream.ptr)
        event.record(self._stream)

    def _buffers(self) -> tuple[Any, NDArray[np.uint8], Any]:
        """The one of this thread's two buffers that was used longer ago."""
        if not hasattr(self._local, "buffers"):
            memories = [self._cuda.alloc_pinned_memory(_CHUNK) for _ in range(2)]
            self._local.buffers = itertools.cycle(
                [(m, np.frombuffer(m, np.uint8, _CHUNK), self._cuda.Event(disable_timing=True)) for m in memories]
            )
        chosen: tuple[Any, NDArray[np.uint8], Any] = next(self._local.buffers)
        return chosen
