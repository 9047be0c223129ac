"""Captured steps of the CPU: calls of compiled functions, which one call makes again, and NumPy's work between them."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from luce.cpu_kernels.machine_code import BoundCall, PythonFunction
from luce.cpu_kernels.thread_pool import CallSequence, Job, Pool
from luce.runtime.device import Array

_ALIGNMENT = 64


class _Block(NamedTuple):
    memory: bytearray
    offset: int
    address: int
    size: int


class Arena:
    """The memory of captured steps' arrays, which all graphs of a device share: each graph begins with all of it.

    An array's memory is lent again once nothing refers to the array, so calls keep views that own nothing (`borrowed`).
    """

    def __init__(self) -> None:
        #: by address
        self._blocks: dict[int, _Block] = {}
        self._addresses: list[int] = []
        self._free: dict[int, list[_Block]] = {}
        self._round = 0

    def begin(self) -> None:
        """Begin a graph: arrays of the one before hold until it is launched."""
        self._round += 1
        self._free = defaultdict(list)
        for block in self._blocks.values():
            self._free[block.size].append(block)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """An array for a captured step. Raises MemoryError."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        block = self._free[room].pop() if self._free[room] else self._block(room)
        lent = np.frombuffer(block.memory, np.uint8, size, block.offset)
        # All views refer to this array, as what owns its memory is none.
        weakref.finalize(lent, self._return, self._round, block).atexit = False
        return lent.view(kind).reshape(shape)

    def borrowed(self, array: Array) -> Array:
        """The same array, without a claim on the arena's memory."""
        block = self._block_of(array)
        if block is None:
            return array
        offset = block.offset + _address(array) - block.address
        return np.ndarray(array.shape, array.dtype, block.memory, offset, array.strides)

    def lends(self, array: Array) -> bool:
        """Whether an array lies in the arena."""
        return self._block_of(array) is not None

    def _block_of(self, array: Array) -> _Block | None:
        number = bisect_right(self._addresses, _address(array)) - 1
        if number < 0 or not array.nbytes:
            return None
        block = self._blocks[self._addresses[number]]
        return block if _address(array) < block.address + block.size else None

    def _block(self, size: int) -> _Block:
        memory = bytearray(size + _ALIGNMENT)
        address = _address(np.frombuffer(memory, np.uint8))
        offset = -address % _ALIGNMENT
        block = _Block(memory, offset, address + offset, size)
        self._blocks[block.address] = block
        self._addresses = sorted(self._blocks)
        return block

    def _return(self, number: int, block: _Block) -> None:
        if number == self._round:
            self._free[block.size].append(block)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class CpuGraph:
    """luce.runtime.device.Graph of compiled functions' calls and the host's work, in their order."""

    def __init__(self, pool: Pool, arena: Arena) -> None:
        self._pool = pool
        self._arena = arena
        self._calls: list[tuple[BoundCall, bool]] = []
        self._parts: list[Callable[[], None]] = []

    def add_job(self, job: Job, arguments: Sequence[Any]) -> None:
        """A call of a job's function."""
        # A replay writes the slot.
        self._calls.append((job.function.bind(0, *job.kernels, *self._borrowed(arguments)), True))

    def add_call(self, function: PythonFunction, arguments: Sequence[Any]) -> None:
        """A call of another compiled function."""
        self._calls.append((function.bind(*self._borrowed(arguments)), False))

    def add_work(self, work: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Work of the host."""
        self.finish()
        self._parts.append(partial(work, *self._borrowed(arguments)))

    def finish(self) -> None:
        """Nothing more is added."""
        if self._calls:
            self._parts.append(partial(self._pool.replay, CallSequence(self._calls)))
            self._calls = []

    def launch(self) -> None:
        """As in the interface."""
        for part in self._parts:
            part()

    def _borrowed(self, arguments: Sequence[Any]) -> list[Any]:
        return [self._arena.borrowed(each) if isinstance(each, np.ndarray) else each for each in arguments]
