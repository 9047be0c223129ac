"""Threads that share the parts of a compiled kernel: one pool for all CPU devices of a process.

A kernel is a compiled function of (arguments, part, scratch): the address of int64 arguments, the number of a part, and
the address of memory of the thread's own. `run_job` makes a job of it, takes parts itself, and returns when all are
done. Several threads may run jobs at the same time; free workers take parts of any of them.

Python calls compiled functions (`Pool.call`) that write the arguments of kernels from the addresses of arrays and run
jobs: Python needs 1 us for the address of an array.

A job has a slot, whose first word is its ticket: a number that grows from job to job, the number of parts, and the next
part. A worker takes a part by raising the next part in a compare-and-swap of the whole ticket, so it takes no part of a
job that has ended. What the job calls is read after that, when the job cannot end before this part is done.

Workers look for jobs for some microseconds and then sleep in a read of an eventfd, so that an idle process takes no
time from others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from luce.cpu_kernels.jit import compiled, compiled_as

#: most parts of a job
MOST_PARTS = 1 << 15
# Words of the pool: stop, sleeping workers, the eventfd, the address of a token to write to it. Slots follow.
_STOP, _SLEEPING, _EVENT, _TOKEN, _HEAD = 0, 8, 16, 17, 32
# Words of a slot: ticket, done parts, kernel, arguments, the addresses of the pool and of memory of the caller's own.
# Each in a cache line of its own where threads write.
_TICKET, _DONE, _KERNEL, _ARGUMENTS, _POOL, _SCRATCH, _SLOT = 0, 8, 16, 17, 18, 19, 32
_SLOTS = 16
# Turns of looking for a job: first without giving the core away, then with.
_BUSY, _YIELDING = 200, 100

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def _load(typing: Any, address: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), make


@intrinsic
def _store(typing: Any, address: Any, value: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), make


@intrinsic
def _add(typing: Any, address: Any, value: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), make


@intrinsic
def _swap(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Whether the word was `expected`, and is `value` now."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), make


@intrinsic
def call_kernel(typing: Any, kernel: Any, arguments: Any) -> Any:
    """Call the C function at an address with a tuple of int64."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(arguments.count)]
        kind = ir.FunctionType(ir.VoidType(), [_I64] * len(values))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), make


def _libc(name: str, count: int) -> Any:
    """A function of the C library: int64 or int32 of `count` int64."""

    @intrinsic
    def call(typing: Any, arguments: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(_I64, [_I64] * count)
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [builder.extract_value(args[0], i) for i in range(count)])

        return types.int64(arguments), make

    return call


_read, _write, _yield = _libc("read", 3), _libc("write", 3), _libc("sched_yield", 0)


@compiled
def _take(slot, scratch):
    """Compute a part of a slot's job. Returns whether there was one."""
    ticket = _load(slot + _TICKET * 8)
    if ticket & 0xFFFF >= (ticket >> 16) & 0xFFFF:
        return False
    if _swap(slot + _TICKET * 8, ticket, ticket + 1):
        call_kernel(_load(slot + _KERNEL * 8), (_load(slot + _ARGUMENTS * 8), ticket & 0xFFFF, scratch))
        _add(slot + _DONE * 8, 1)
    return True


@compiled
def _take_any(pool, scratch):
    found = False
    for number in range(_SLOTS):
        while _take(pool + (_HEAD + number * _SLOT) * 8, scratch):
            found = True
    return found


@compiled_as("void(int64, int64)")
def _work(pool, scratch):
    """The life of a worker."""
    idle = 0
    while _load(pool + _STOP * 8) == 0:
        if _take_any(pool, scratch):
            idle = 0
        elif idle < _BUSY + _YIELDING:
            idle += 1
            if idle > _BUSY:
                _yield(())
        else:
            idle = 0
            _add(pool + _SLEEPING * 8, 1)
            # A job that began before this worker counted as sleeping has not woken it.
            if not _take_any(pool, scratch) and _load(pool + _STOP * 8) == 0:
                _read((_load(pool + _EVENT * 8), scratch, 8))
            _add(pool + _SLEEPING * 8, -1)


@compiled
def hold(array):
    """Keep an array of compiled code until here. numba frees it behind its last use, and its address is none."""
    return array.size


@compiled
def run_job(slot, kernel, arguments, parts):
    """Call the kernel at an address for parts 0 to `parts` - 1, in any order, with the workers that are free.

    `arguments`: int64 [n]. Other arrays whose addresses it holds need `hold` behind the job, unless Python has them.
    """
    pool, scratch = _load(slot + _POOL * 8), _load(slot + _SCRATCH * 8)
    job = (_load(slot + _TICKET * 8) >> 32) + 1
    _store(slot + _DONE * 8, 0)
    _store(slot + _KERNEL * 8, kernel)
    _store(slot + _ARGUMENTS * 8, arguments.ctypes.data)
    _store(slot + _TICKET * 8, (job & 0x7FFFFFFF) << 32 | parts << 16)
    sleeping = min(_load(pool + _SLEEPING * 8), parts - 1)
    for _ in range(sleeping):
        _write((_load(pool + _EVENT * 8), _load(pool + _TOKEN * 8), 8))
    while _take(slot, scratch):
        pass
    turns = 0
    while _load(slot + _DONE * 8) < parts:
        turns += 1
        if turns > _BUSY:
            _yield(())
    hold(arguments)


class Job(NamedTuple):
    """A compiled function of (slot, kernels, *arguments), which runs jobs in the slot, and the addresses of the kernels
    for them."""

    function: Callable[..., None]
    kernels: tuple[int, ...]


class Pool:
    """`threads` threads: the caller of a job, and workers. `scratch`: bytes that each thread has for a kernel."""

    def __init__(self, threads: int, scratch: int) -> None:
        #: how many threads share a job
        self.threads = threads
        self._words = _aligned((_HEAD + _SLOTS * _SLOT) * 8)
        self._token = np.ones(1, np.int64)
        self._event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        words = self._words.view(np.int64)
        words[_EVENT], words[_TOKEN] = self._event, self._token.ctypes.data
        self._address = self._words.ctypes.data
        self._scratch = _aligned(scratch * (threads - 1 + _SLOTS))
        places = [self._scratch.ctypes.data + i * scratch for i in range(threads - 1 + _SLOTS)]
        for i in range(_SLOTS):
            first = _HEAD + i * _SLOT
            words[first + _POOL], words[first + _SCRATCH] = self._address, places[i]
        # The slot of the last job is taken first: its memory is in the caches. `_tokens` has one token for each free
        # slot; threading.Semaphore takes ten times as long (1.1 us).
        self._free = [self._address + (_HEAD + i * _SLOT) * 8 for i in range(_SLOTS)]
        self._tokens: SimpleQueue[None] = SimpleQueue()
        for _ in self._free:
            self._tokens.put(None)
        self._workers = [
            threading.Thread(target=_work, args=(self._address, place), name=f"luce-cpu-{i}", daemon=True)
            for i, place in enumerate(places[_SLOTS:])
        ]
        for worker in self._workers:
            worker.start()

    def call(self, job: Job, *arguments: Any) -> None:
        """Call the function of a job. Any thread may do so."""
        self._tokens.get()
        slot = self._free.pop()
        try:
            job.function(slot, job.kernels, *arguments)
        finally:
            self._free.append(slot)
            self._tokens.put(None)

    def close(self) -> None:
        """End the workers. No job may run. Idempotent."""
        if self._event < 0:
            return
        self._words.view(np.int64)[_STOP] = 1
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
