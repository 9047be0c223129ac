"""Jobs in compiled code: how a kernel's parts are shared by the threads of luce.cpu_kernels.thread_pool.

A kernel is a compiled function of (arguments, part, scratch): the address of int64 arguments, the number of a part, and
the address of memory of the thread's own. `run_job` makes a job of it, takes parts itself, and returns when all are
done. Several threads may run jobs at the same time; free workers take parts of any of them.

A job has a slot, whose first word is its ticket: a number that grows from job to job, the number of parts, and the next
part. A worker takes a part by raising the next part in a compare-and-swap of the whole ticket, so it takes no part of a
job that has ended. What the job calls is read after that, when the job cannot end before this part is done.

Workers look for jobs for some microseconds and then sleep in a read of an eventfd, so that an idle process takes no
time from others.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from luce.cpu_kernels.jit import compiled
from luce.cpu_kernels.memory import c_library
from luce.cpu_kernels.thread_pool import (
    ARGUMENTS,
    DONE,
    EVENT,
    HEAD,
    KERNEL,
    POOL,
    SCRATCH,
    SLEEPING,
    SLOT,
    SLOTS,
    STOP,
    TICKET,
    TOKEN,
)

# Turns of looking for a job: first without giving the core away, then with.
_BUSY, _YIELDING = 200, 100

_I64 = ir.IntType(64)
_read, _write, _yield = c_library("read", 3), c_library("write", 3), c_library("sched_yield", 0)


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


@intrinsic
def _call_function(typing: Any, function: Any, words: Any) -> Any:
    """Call a function that Python calls, by the address of its words. Returns what it returns (jit.py)."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), make


@compiled
def _take(slot, scratch):
    """Compute a part of a slot's job. Returns whether there was one."""
    ticket = _load(slot + TICKET * 8)
    if ticket & 0xFFFF >= (ticket >> 16) & 0xFFFF:
        return False
    if _swap(slot + TICKET * 8, ticket, ticket + 1):
        call_kernel(_load(slot + KERNEL * 8), (_load(slot + ARGUMENTS * 8), ticket & 0xFFFF, scratch))
        _add(slot + DONE * 8, 1)
    return True


@compiled
def _take_any(pool, scratch):
    found = False
    for number in range(SLOTS):
        while _take(pool + (HEAD + number * SLOT) * 8, scratch):
            found = True
    return found


@compiled
def work(pool, scratch):
    """The life of a worker."""
    idle = 0
    while _load(pool + STOP * 8) == 0:
        if _take_any(pool, scratch):
            idle = 0
        elif idle < _BUSY + _YIELDING:
            idle += 1
            if idle > _BUSY:
                _yield(())
        else:
            idle = 0
            _add(pool + SLEEPING * 8, 1)
            # A job that began before this worker counted as sleeping has not woken it.
            if not _take_any(pool, scratch) and _load(pool + STOP * 8) == 0:
                _read((_load(pool + EVENT * 8), scratch, 8))
            _add(pool + SLEEPING * 8, -1)


@compiled
def run_job(slot, kernel, arguments, parts):
    """Call the kernel at an address for parts 0 to `parts` - 1, in any order, with the workers that are free.

    `arguments`: int64 [n].
    """
    pool, scratch = _load(slot + POOL * 8), _load(slot + SCRATCH * 8)
    job = (_load(slot + TICKET * 8) >> 32) + 1
    _store(slot + DONE * 8, 0)
    _store(slot + KERNEL * 8, kernel)
    _store(slot + ARGUMENTS * 8, arguments.ctypes.data)
    _store(slot + TICKET * 8, (job & 0x7FFFFFFF) << 32 | parts << 16)
    sleeping = min(_load(pool + SLEEPING * 8), parts - 1)
    for _ in range(sleeping):
        _write((_load(pool + EVENT * 8), _load(pool + TOKEN * 8), 8))
    while _take(slot, scratch):
        pass
    turns = 0
    while _load(slot + DONE * 8) < parts:
        turns += 1
        if turns > _BUSY:
            _yield(())


@compiled
def replay(slot, sequence, count):
    """Make `count` calls one after another. `sequence`: the address of a CallSequence's words."""
    _store(sequence, 0)
    for number in range(count):
        call = sequence + (2 + 3 * number) * 8
        words = _load(call + 8)
        if _load(call + 16) != 0:
            _store(words + 8, slot)
        wrong = _call_function(_load(call), words)
        if wrong != 0:
            _store(sequence, number + 1)
            _store(sequence + 8, wrong)
            return
