"""Reading snapshots with several threads, ahead of the copies to the devices."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from luce.kvcache.disk.deadline import Deadline, SlowDiskError
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.reader import Reader, StoredTensor
from luce.kvcache.disk.store import Store
from luce.kvcache.disk.threads import Threads
from luce.runtime.switch_interval import short_switch_interval
from luce.shard.saved_state import Tensors

T = TypeVar("T")

#: bytes of tensors that are decoded ahead of the devices
_AHEAD = 192 << 20
#: bytes of memory that several tensors share
_SLAB = 16 << 20
#: tensors begin at multiples of this in memory
_ALIGNED = 256
_THREADS = min(16, os.cpu_count() or 1)


class ReadAhead:
    """The threads that read while a sequence waits. All methods but `close` raise SlowDiskError at the deadline."""

    def __init__(self) -> None:
        self._threads = Threads(_THREADS, "luce-cache-read")

    def open(self, store: Store, snapshot: Snapshot, deadline: Deadline) -> Reader:
        """Open a snapshot. Raises DamagedError or OSError as well."""
        opened = self._threads.submit(store.open, snapshot)
        try:
            return deadline.wait(opened)
        except SlowDiskError:
            opened.add_done_callback(_close)
            raise

    def run(self, task: Callable[[], T], deadline: Deadline) -> T:
        """The result of a task that reads. Raises what the task raises as well."""
        return deadline.wait(self._threads.submit(task))

    def decode(
        self,
        stored: Iterable[tuple[Mapping[str, StoredTensor], T]],
        memory: Callable[[int], NDArray[np.uint8]],
        deadline: Deadline,
    ) -> Generator[tuple[Tensors, T]]:
        """Decode groups of tensors, each group with a value that is passed through. Raises DamagedError or OSError as
        well.

        The next groups are decoded meanwhile. `memory` allocates the given number of bytes for tensors.
        """
        with short_switch_interval:
            yield from self._decode(stored, memory, deadline)

    def close(self, seconds: float) -> None:
        """Stop; wait up to `seconds` for the reads in progress."""
        self._threads.close(seconds)

    def _decode(
        self,
        stored: Iterable[tuple[Mapping[str, StoredTensor], T]],
        memory: Callable[[int], NDArray[np.uint8]],
        deadline: Deadline,
    ) -> Generator[tuple[Tensors, T]]:
        ahead: deque[tuple[dict[str, Future[NDArray[np.generic]]], T]] = deque()
        sizes: deque[int] = deque()

        def first() -> tuple[Tensors, T]:
            futures, value = ahead[0]
            tensors = {name: deadline.wait(future) for name, future in futures.items()}
            ahead.popleft()
            sizes.popleft()
            return tensors, value

        try:
            for tensors, value in stored:
                size = sum(tensor.nbytes for tensor in tensors.values())
                while ahead and sum(sizes) + size > _AHEAD:
                    yield first()
                ahead.append((self._start(tensors, memory), value))
                sizes.append(size)
            while ahead:
                yield first()
        finally:
            for futures, _ in ahead:
                for future in futures.values():
                    future.cancel()

    def _start(
        self, tensors: Mapping[str, StoredTensor], memory: Callable[[int], NDArray[np.uint8]]
    ) -> dict[str, Future[NDArray[np.generic]]]:
        # Memory that is fast to copy from comes in slabs: tensors share one, so that most need no new allocation.
        slab, futures = np.empty(0, np.uint8), {}
        sizes = {name: -(-tensor.nbytes // _ALIGNED) * _ALIGNED for name, tensor in tensors.items()}
        rest = sum(sizes.values())
        for name, tensor in tensors.items():
            if sizes[name] > len(slab):
                slab = memory(max(min(rest, _SLAB), sizes[name]))
            futures[name] = self._threads.submit(tensor.read, slab[: tensor.nbytes])
            slab = slab[sizes[name] :]
            rest -= sizes[name]
        return futures


def _close(opened: Future[Reader]) -> None:
    """Close a reader that was opened too late."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()
