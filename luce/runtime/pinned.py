"""Pinned host memory in arrays of any size, cut from slabs that a thread makes before they are needed.

Pinning takes milliseconds for each few MiB, too long between two steps. A slab is anonymous memory, touched first and
then pinned, which keeps the driver busy for the shortest time. It is private, as shared memory has no huge pages:
beside an H200 four threads touch 64 MiB in 7 ms instead of 17, and pinning takes 3 instead of 8. A forked child does
not get it: a write would then move the page away from the driver.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from luce.errors import DeviceError

_log = logging.getLogger(__name__)

_SLAB = 64 << 20
# Each array begins at a multiple of so many bytes.
_ALIGNED = 4096
# Bytes that are made ahead: half as many as are in use, but between these two; beside a reservation, the first.
_LEAST_AHEAD, _MOST_AHEAD = 4 * _SLAB, 1 << 30
# Threads that touch a slab.
_TOUCHERS = 4


class PinnedPool:
    """Slabs of `slab` bytes, and the arrays cut from them. Thread-safe.

    `pin` pins an array for the devices and returns a function that undoes it; it may raise DeviceError. The pool makes
    half as many bytes ahead as are in use, but between `least_ahead` and `most_ahead`.
    """

    def __init__(
        self,
        pin: Callable[[NDArray[np.uint8]], Callable[[], None]],
        slab: int = _SLAB,
        *,
        least_ahead: int = _LEAST_AHEAD,
        most_ahead: int = _MOST_AHEAD,
    ) -> None:
        self._pin = pin
        self._slab = slab
        self._least_ahead, self._most_ahead = least_ahead, most_ahead
        self._lock = threading.Lock()
        #: of each slab: its memory, and its free ranges by where they begin
        self._slabs: list[NDArray[np.uint8]] = []
        self._free: list[dict[int, int]] = []
        self._unpin: list[Callable[[], None]] = []
        #: (slab, begin, size) of arrays that are gone; any thread appends at any time
        self._returned: deque[tuple[int, int, int]] = deque()
        self._total = self._used = 0
        #: most bytes that are reserved, with those in use then
        self._reserved = 0
        #: whether a thread is making slabs
        self.growing = False
        self._closed = False

    def take(self, size: int) -> NDArray[np.uint8]:
        """uint8 [size]; the memory returns to the pool with the last array on it. Raises DeviceError."""
        size = max(1, size)
        size_aligned = -(-size // _ALIGNED) * _ALIGNED
        while True:
            with self._lock:
                found = self._find(size_aligned)
            self._begin_growing()
            if found is not None:
                return self._lent(*found, size)
            self._grow(max(size_aligned, self._slab))

    def reserve(self, size: int) -> None:
        """Make `size` bytes ahead in the background, beside those in use now: callers may take them soon."""
        with self._lock:
            self._collect()
            self._reserved = self._used + size
        self._begin_growing()

    def close(self) -> None:
        """Unpin everything; arrays that callers hold stay readable. Idempotent."""
        with self._lock:
            self._closed = True
            unpin, self._unpin = self._unpin, []
        for undo in unpin:
            undo()

    @property
    def _short(self) -> bool:
        """Whether too few bytes are made ahead."""
        ahead = min(max(self._used // 2, self._least_ahead), self._most_ahead)
        return self._total < max(self._used + ahead, self._reserved + self._least_ahead) and not self._closed

    def _find(self, size_aligned: int) -> tuple[int, int, int] | None:
        """Take a free range: (slab, begin, size), None if there is none."""
        self._collect()
        for number, free in enumerate(self._free):
            for begin, size in free.items():
                if size >= size_aligned:
                    del free[begin]
                    if size > size_aligned:
                        free[begin + size_aligned] = size - size_aligned
                    self._used += size_aligned
                    return number, begin, size_aligned
        return None

    def _collect(self) -> None:
        """Free the ranges of arrays that are gone."""
        while self._returned:
            self._give(*self._returned.popleft())

    def _give(self, number: int, begin: int, size: int) -> None:
        """Free a range, and join it with the free ranges on both sides."""
        self._used -= size
        free = self._free[number]
        size += free.pop(begin + size, 0)
        before = next((at for at, length in free.items() if at + length == begin), None)
        if before is None:
            free[begin] = size
        else:
            free[before] += size

    def _lent(self, number: int, begin: int, size_aligned: int, size: int) -> NDArray[np.uint8]:
        # The buffer's finalizer runs when the last array on it is gone; NumPy's own views have none. It holds the slab.
        slab = self._slabs[number]
        owner = (ctypes.c_uint8 * size).from_address(slab.ctypes.data + begin)
        weakref.finalize(owner, _return, self._returned, slab, (number, begin, size_aligned)).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def _grow(self, size: int) -> None:
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DeviceError(f"{size} bytes of host memory: {error}") from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                memory.madvise(getattr(mmap, advice))
        slab = np.frombuffer(memory, np.uint8)
        parts = np.array_split(slab[::_ALIGNED], _TOUCHERS)
        with ThreadPoolExecutor(_TOUCHERS, "luce-pin") as touchers:
            list(touchers.map(lambda part: part.fill(0), parts))
        unpin = self._pin(slab)
        with self._lock:
            if not self._closed:
                self._slabs.append(slab)
                self._free.append({0: size})
                self._unpin.append(unpin)
                self._total += size
                return
        unpin()
        raise DeviceError("the device is closed")

    def _begin_growing(self) -> None:
        with self._lock:
            wanted = self._short and not self.growing
            self.growing |= wanted
        if wanted:
            threading.Thread(target=self._grow_ahead, name="luce-pin", daemon=True).start()

    def _grow_ahead(self) -> None:
        try:
            while True:
                with self._lock:
                    self.growing = self._short
                    if not self.growing:
                        return
                self._grow(self._slab)
        except DeviceError as error:
            _log.debug("no more pinned memory: %s", error)
            self.growing = False


def _return(to: deque[tuple[int, int, int]], slab: NDArray[np.uint8], range_: tuple[int, int, int]) -> None:
    to.append(range_)
