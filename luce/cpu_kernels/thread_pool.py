"""Threads that share the parts of compiled kernels (luce/cpu_kernels/jobs.py): one pool for all CPU devices of a
process.

Python calls compiled functions (`Pool.call`) that write the arguments of kernels from the addresses of arrays and run
jobs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from luce.cpu_kernels.machine_code import BoundCall, PythonFunction

#: most parts of a job
MOST_PARTS = 1 << 15
#: words of the pool: stop, sleeping workers, the eventfd, the address of a token to write to it; slots follow
STOP, SLEEPING, EVENT, TOKEN, HEAD = 0, 8, 16, 17, 32
#: words of a slot: ticket, done parts, kernel, arguments, the addresses of the pool and of memory of the caller's own;
#: each in a cache line of its own where threads write
TICKET, DONE, KERNEL, ARGUMENTS, POOL, SCRATCH, SLOT = 0, 8, 16, 17, 18, 19, 32
SLOTS = 16
# The life of a worker: (pool, scratch). ctypes releases the interpreter's lock.
_Worker = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
_Replay = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Job(NamedTuple):
    """A compiled function of (slot, *kernels, *arguments), which runs jobs in the slot, and the addresses of their
    kernels."""

    function: PythonFunction
    kernels: tuple[int, ...]


class CallSequence:
    """Calls of compiled functions, which Pool.replay makes one after another without Python between them."""

    def __init__(self, calls: Sequence[tuple[BoundCall, bool]]) -> None:
        """`calls`: each with whether its first argument is a slot, which a replay writes."""
        self._calls = [call for call, _ in calls]
        # Of the first call that failed its number, from 1 on, and what it returned; then of each call its function, the
        # address of its words, and whether it takes a slot.
        facts = [(call.function, call.words.ctypes.data, takes_slot) for call, takes_slot in calls]
        self._words = np.array([0, 0, *(word for each in facts for word in each)], np.int64)
        self.address = self._words.ctypes.data

    def __len__(self) -> int:
        return len(self._calls)

    def check(self) -> None:
        """Raises TypeError if a call of the last replay got an array of another type than its function takes."""
        if failed := self._words[0]:
            raise self._calls[failed - 1].error(int(self._words[1]))


class Pool:
    """`threads` threads: the caller of a job, and workers. `scratch`: bytes that each thread has for a kernel; `work`
    and `replay`: the addresses of compiled functions (jobs.py)."""

    def __init__(self, threads: int, scratch: int, work: int, replay: int) -> None:
        #: how many threads share a job
        self.threads = threads
        self._words = _aligned((HEAD + SLOTS * SLOT) * 8)
        self._token = np.ones(1, np.int64)
        self._event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        words = self._words.view(np.int64)
        words[EVENT], words[TOKEN] = self._event, self._token.ctypes.data
        self._address = self._words.ctypes.data
        self._scratch = _aligned(scratch * (threads - 1 + SLOTS))
        places = [self._scratch.ctypes.data + i * scratch for i in range(threads - 1 + SLOTS)]
        for i in range(SLOTS):
            first = HEAD + i * SLOT
            words[first + POOL], words[first + SCRATCH] = self._address, places[i]
        # The slot of the last job is taken first: its memory is in the caches. `_tokens` has one token for each free
        # slot; threading.Semaphore takes ten times as long (1.1 us).
        self._free = [self._address + (HEAD + i * SLOT) * 8 for i in range(SLOTS)]
        self._tokens: SimpleQueue[None] = SimpleQueue()
        for _ in self._free:
            self._tokens.put(None)
        self._workers = [
            threading.Thread(target=_Worker(work), args=(self._address, place), name=f"luce-cpu-{i}", daemon=True)
            for i, place in enumerate(places[SLOTS:])
        ]
        for worker in self._workers:
            worker.start()
        self._replay = _Replay(replay)

    def call(self, job: Job, *arguments: Any) -> None:
        """Call the function of a job. Any thread may do so."""
        with self._slot() as slot:
            job.function(slot, *job.kernels, *arguments)

    def replay(self, sequence: CallSequence) -> None:
        """Make the calls of a sequence, which one thread may replay at a time. Raises TypeError as they would."""
        with self._slot() as slot:
            self._replay(slot, sequence.address, len(sequence))
        sequence.check()

    @contextmanager
    def _slot(self) -> Iterator[int]:
        self._tokens.get()
        slot = self._free.pop()
        try:
            yield slot
        finally:
            self._free.append(slot)
            self._tokens.put(None)

    def close(self) -> None:
        """End the workers. No job may run. Idempotent."""
        if self._event < 0:
            return
        self._words.view(np.int64)[STOP] = 1
        os.write(self._event, len(self._workers).to_bytes(8, "little") if self._workers else (1).to_bytes(8, "little"))
        for worker in self._workers:
            worker.join()
        os.close(self._event)
        self._event = -1


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeroed memory whose address 64 divides."""
    memory = np.zeros(size + 64, np.uint8)
    skip = -memory.ctypes.data % 64
    return memory[skip : skip + size]
