"""Shared memory: an anonymous memory file that two processes map. Over a network, each side has memory of its own.

The memory has no name, neither in a file system nor in /dev/shm, and goes with the last mapping.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime.device import Device

_PAGE_BYTES = 4096


def arena_size(sizes: Iterable[int]) -> int:
    """Bytes of an arena that has memory for arrays of these sizes."""
    return _PAGE_BYTES + sum(map(aligned_size, sizes))


def aligned_size(size: int) -> int:
    """Bytes that an array of `size` bytes takes in an arena."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


class Arena:
    """`size` bytes of the memory file that the descriptor `fd` names, or without a descriptor of this process alone.

    The caller may close the descriptor afterwards. The first page has two flags. Raises OutOfMemoryError.
    """

    def __init__(self, size: int, fd: int | None) -> None:
        size = max(size, _PAGE_BYTES)
        try:
            self._map = mmap.mmap(-1 if fd is None else fd, size)
        except OSError as error:
            raise OutOfMemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
        #: the descriptor of the memory file to pass to the peer; None in the peer, and over a network
        self.fd: int | None = None
        #: uint8 [size]
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        # Each flag has a cache line of its own.
        #: uint32 [1], the number of inputs that the server has made ready
        self.input_flag: NDArray[np.uint32] = self.memory[0:4].view(np.uint32)
        #: uint32 [1], the number of outputs that the daemon's GPUs have made ready
        self.output_flag: NDArray[np.uint32] = self.memory[64:68].view(np.uint32)
        #: float32 [1], which devices copy to try whether they reach this memory
        self.scratch: NDArray[np.float32] = self.memory[128:132].view(np.float32)
        self._used = _PAGE_BYTES
        self._unpin: dict[str, Callable[[], None]] = {}

    def allocate(self, size: int) -> int:
        """Reserve `size` bytes. Returns their offset."""
        at = self._used
        assert at + aligned_size(size) <= len(self.memory), "the arena is too small"
        self._used += aligned_size(size)
        return at

    def offset(self, array: NDArray[np.generic]) -> int:
        """Where an array that lies in the arena begins."""
        return int(array.ctypes.data - self.memory.ctypes.data)

    def floats(self, at: int, rows: int, widths: Iterable[int]) -> tuple[NDArray[np.float32], ...]:
        """Arrays float32 [rows, width], one after another from offset `at` on."""
        arrays = []
        for width in widths:
            size = 4 * rows * width
            arrays.append(self.memory[at : at + size].view(np.float32).reshape(rows, width))
            at += size
        return tuple(arrays)

    def pin(self, devices: Iterable[Device]) -> list[str]:
        """Pin the memory, so that copies of the devices access it directly; once for all GPUs of a vendor.

        Returns the errors of vendors for which that failed. Their copies block the host, but are correct.
        """
        problems = []
        for device in devices:
            if device.name.kind in self._unpin:
                continue
            try:
                self._unpin[device.name.kind] = device.pin(self.memory)
            except DeviceError as error:
                problems.append(str(error))
        return problems

    def close(self) -> None:
        """Undo `pin` and close the descriptor; the memory goes with its last array. Idempotent."""
        for unpin in self._unpin.values():
            unpin()
        self._unpin.clear()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def shared_arena(size: int) -> Arena:
    """An arena in a new memory file of fixed size. Raises OutOfMemoryError."""
    with contextlib.ExitStack() as failing:
        try:
            fd = os.memfd_create("luce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            failing.callback(os.close, fd)
            # Without it, pages are allocated at their first access, which raises SIGBUS when memory has run out.
            os.posix_fallocate(fd, 0, max(size, _PAGE_BYTES))
            # If a peer shrank the file, accesses of the other side would raise SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise OutOfMemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
        arena = Arena(size, fd)
        failing.pop_all()
    arena.fd = fd
    return arena
