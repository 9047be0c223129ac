"""Pinned host memory in pieces of any size, out of slabs that a thread makes before they are needed.

Pinning takes milliseconds for each few MiB, too long between two steps. A slab is memory of the system's own, touched
first and then pinned, so that the driver is busy with it for as short as can be. It is private, as shared memory has no
huge pages: beside an H200 four threads touch 64 MiB in 7 ms instead of 17, and pinning takes 3 instead of 8. A child
that is forked does not get it, as writing to it would then move it away from the driver.
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
#: where each piece begins
_ALIGNED = 4096
#: bytes that are made ahead: half as many as are in use, between these; beside what is expected, the first
_LEAST_AHEAD, _MOST_AHEAD = 4 * _SLAB, 1 << 30
#: threads that touch a slab
_TOUCHERS = 4


class PinnedPool:
    """`pin` pins an array for the devices and returns what undoes that; it may raise DeviceError. Thread-safe."""

    def __init__(self, pin: Callable[[NDArray[np.uint8]], Callable[[], None]], slab: int = _SLAB) -> None:
        self._pin = pin
        self._slab = slab
        self._lock = threading.Lock()
        #: of each slab: its memory, and its free ranges by where they begin
        self._slabs: list[NDArray[np.uint8]] = []
        self._free: list[dict[int, int]] = []
        self._unpin: list[Callable[[], None]] = []
        #: (slab, begin, size) of pieces that nobody has any more, which may be said at any time by any thread
        self._returned: deque[tuple[int, int, int]] = deque()
        self._total = self._used = 0
        #: most bytes that are expected to be in use
        self._reserved = 0
        self._growing = False
        self._closed = False

    def take(self, size: int) -> NDArray[np.uint8]:
        """uint8 [size]; the memory comes back with the last array on it. Raises DeviceError if none can be had."""
        size = max(1, size)
        room = -(-size // _ALIGNED) * _ALIGNED
        while True:
            with self._lock:
                found = self._find(room)
            self._begin_growing()
            if found is not None:
                return self._lent(*found, size)
            self._grow(max(room, self._slab))

    def reserve(self, size: int) -> None:
        """So many bytes beside what is in use now may be taken soon: they are made ahead, behind the scenes."""
        with self._lock:
            self._collect()
            self._reserved = self._used + size
        self._begin_growing()

    def close(self) -> None:
        """Unpin everything; arrays that are left may still be read. Idempotent."""
        with self._lock:
            self._closed = True
            unpin, self._unpin = self._unpin, []
        for undo in unpin:
            undo()

    @property
    def _short(self) -> bool:
        """Whether too little is made ahead."""
        ahead = min(max(self._used // 2, _LEAST_AHEAD), _MOST_AHEAD)
        return self._total < max(self._used + ahead, self._reserved + _LEAST_AHEAD) and not self._closed

    def _find(self, room: int) -> tuple[int, int, int] | None:
        """(slab, begin, size) of a free range, which is taken."""
        self._collect()
        for number, free in enumerate(self._free):
            for begin, size in free.items():
                if size >= room:
                    del free[begin]
                    if size > room:
                        free[begin + room] = size - room
                    self._used += room
                    return number, begin, room
        return None

    def _collect(self) -> None:
        """Take back the pieces that nobody has any more."""
        while self._returned:
            self._give(*self._returned.popleft())

    def _give(self, number: int, begin: int, size: int) -> None:
        """A range is free again; joined with those on both sides."""
        self._used -= size
        free = self._free[number]
        size += free.pop(begin + size, 0)
        before = next((at for at, length in free.items() if at + length == begin), None)
        if before is None:
            free[begin] = size
        else:
            free[before] += size

    def _lent(self, number: int, begin: int, room: int, size: int) -> NDArray[np.uint8]:
        # The array's buffer tells when the last array on it is gone; NumPy's own views do not. Its slab lives as long.
        slab = self._slabs[number]
        owner = (ctypes.c_uint8 * size).from_address(slab.ctypes.data + begin)
        weakref.finalize(owner, _return, self._returned, slab, (number, begin, room)).atexit = False
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
            wanted = self._short and not self._growing
            self._growing |= wanted
        if wanted:
            threading.Thread(target=self._grow_ahead, name="luce-pin", daemon=True).start()

    def _grow_ahead(self) -> None:
        try:
            while True:
                with self._lock:
                    self._growing = self._short
                    if not self._growing:
                        return
                self._grow(self._slab)
        except DeviceError as error:
            _log.debug("no more pinned memory: %s", error)
            self._growing = False


def _return(to: deque[tuple[int, int, int]], slab: NDArray[np.uint8], piece: tuple[int, int, int]) -> None:
    to.append(piece)
