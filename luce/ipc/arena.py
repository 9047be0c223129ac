"""Memory that two processes see: an anonymous memory file, mapped by both. Over a network, memory of each side's own.

Nothing of it has a name: no file, nothing in /dev/shm. It is gone with the last mapping.
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

_ALIGNED = 4096


def arena_size(parts: Iterable[int]) -> int:
    """Bytes of an arena that arrays of these sizes are taken from."""
    return _ALIGNED + sum(map(room, parts))


def room(size: int) -> int:
    """Bytes that an array of `size` bytes takes in an arena."""
    return -(-size // _ALIGNED) * _ALIGNED


class Arena:
    """`memory`: uint8 [size] of the memory file that a descriptor names, which may be closed then, or of this process.

    `fd`: descriptor of the memory file to hand to the peer; None in the peer, and over a network.

    The first page is for two words, uint32 [1]: `given` counts the inputs that the server has given, `told` the outputs
    that the daemon's GPUs have told.
    """

    def __init__(self, size: int, fd: int | None) -> None:
        size = max(size, _ALIGNED)
        try:
            self._map = mmap.mmap(-1 if fd is None else fd, size)
        except OSError as error:
            raise OutOfMemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
        self.fd: int | None = None
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        # Each in a cache line of its own.
        self.given, self.told = (self.memory[at : at + 4].view(np.uint32) for at in (0, 64))
        self._taken = _ALIGNED
        self._unpin: dict[str, Callable[[], None]] = {}

    def take(self, size: int) -> int:
        """The place of `size` bytes that nobody else gets."""
        at = self._taken
        assert at + room(size) <= len(self.memory), "the arena is too small"
        self._taken += room(size)
        return at

    def place(self, array: NDArray[np.generic]) -> int:
        """Where an array in the arena begins."""
        return int(array.ctypes.data - self.memory.ctypes.data)

    def floats(self, at: int, rows: int, widths: Iterable[int]) -> tuple[NDArray[np.float32], ...]:
        """Arrays float32 [rows, width] side by side from a place on."""
        arrays = []
        for width in widths:
            size = 4 * rows * width
            arrays.append(self.memory[at : at + size].view(np.float32).reshape(rows, width))
            at += size
        return tuple(arrays)

    def pin(self, devices: Iterable[Device]) -> list[str]:
        """Let the devices' copies reach the memory directly; once for all GPUs of a vendor.

        Returns why it could not be done: copies then stop the host, and are right all the same.
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
    """An arena in a new memory file, which can neither shrink nor grow. Raises OutOfMemoryError."""
    with contextlib.ExitStack() as failing:
        try:
            fd = os.memfd_create("luce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            failing.callback(os.close, fd)
            # Pages that are taken when they are first used end the process, by SIGBUS, if there are none by then.
            os.posix_fallocate(fd, 0, max(size, _ALIGNED))
            # A peer that shrank it would turn the other side's accesses into SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise OutOfMemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
        arena = Arena(size, fd)
        failing.pop_all()
    arena.fd = fd
    return arena
