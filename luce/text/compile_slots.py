"""Calls that may take seconds: few at a time, with a time limit, and a cache of their results."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, NamedTuple, TypeVar

from luce.errors import QueueFullError, UnavailableError
from luce.shard.timing import Durations, Histogram

Result = TypeVar("Result")

#: most calls at the same time
SLOTS = 2
#: Bytes of the stack of each thread; only those in use are memory. The grammar library calls itself for each rule or
#: schema that another one names, and ends the process where the stack does: with 8 MiB behind a chain of 700 schemas.
#: The 20,000 that a schema may have take 100 MiB.
_STACK = 256 << 20
#: most calls that wait for a slot
_MOST_WAITING = 64


class SlotStats(NamedTuple):
    """Counters of calls."""

    seconds: Durations
    #: calls that found a result, or a call of the same key
    hits: int
    misses: int


class Ticket(Generic[Result]):
    """A call that waits for a slot, runs, or is done. Any thread may wait for it: while `seconds_left` is more than 0,
    until `future` is done. The result of a call that takes longer is `late`, and its slot stays taken until it ends.
    """

    def __init__(self, limit: float, late: Result) -> None:
        self.future: Future[Result] = Future()
        self._limit = limit
        self._late = late
        self._lock = threading.Lock()
        #: when the call began
        self._began: float | None = None

    def run(self, function: Callable[[], Result]) -> None:
        """Make the call."""
        self._began = time.monotonic()
        try:
            self._finish(function(), None)
        except BaseException as error:
            self._finish(None, error)

    def _finish(self, result: Result | None, error: BaseException | None) -> None:
        with self._lock:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)  # type: ignore[arg-type]

    def seconds_left(self, asked: float) -> float:
        """Seconds to wait for the result at most, for somebody who asked for it at a monotonic time.

        Raises QueueFullError if the call has waited for a slot so long.
        """
        now = time.monotonic()
        left = self._limit - (now - (asked if self._began is None else self._began))
        if left > 0 or self.future.done():
            return max(left, 0.0)
        if self._began is None:
            raise QueueFullError("other grammars are being compiled", retry_after=round(self._limit) or 1)
        self._finish(self._late, None)
        return 0.0

    def result(self) -> Result:
        """Wait for the result. Raises what the call raised, and QueueFullError."""
        asked = time.monotonic()
        while not self.future.done():
            wait([self.future], self.seconds_left(asked))
        return self.future.result()


class CompileSlots(Generic[Result]):
    """Makes calls on threads of its own, and keeps the results that were used last. Any thread may call it.

    `limit`: seconds that a call may take; `late`: the result of one that takes longer. The cache keeps at most
    `entries` results, and calls with a `cost` of at most `costs` together.
    """

    def __init__(self, limit: float, late: Result, *, entries: int, costs: int) -> None:
        self._limit = limit
        self._late = late
        self._entries = entries
        self._costs = costs
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._tickets: OrderedDict[bytes, tuple[Ticket[Result], int]] = OrderedDict()
        self._closed = False
        self._seconds = Histogram()
        self.hits = 0
        self.misses = 0

    def ticket(self, key: bytes, cost: int, function: Callable[[], Result]) -> Ticket[Result]:
        """The call for a key: `function` is called unless a call for this key runs, or its result is kept.

        Raises QueueFullError if too many calls wait for a slot, UnavailableError after `close`.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("no more grammars are compiled", code="draining")
            found = self._tickets.get(key)
            if found is not None and not (found[0].future.done() and found[0].future.exception()):
                self._tickets.move_to_end(key)
                self.hits += 1
                return found[0]
            if sum(not ticket.future.done() for ticket, _ in self._tickets.values()) >= SLOTS + _MOST_WAITING:
                raise QueueFullError("other grammars are being compiled", retry_after=round(self._limit) or 1)
            self.misses += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(SLOTS, "luce-grammar")
            made = Ticket(self._limit, self._late)
            self._tickets[key] = made, cost
            with _threads_with_stack(_STACK):
                self._pool.submit(self._run, made, function)
            self._evict()
            return made

    def _run(self, ticket: Ticket[Result], function: Callable[[], Result]) -> None:
        begin = time.monotonic()
        ticket.run(function)
        with self._lock:
            self._seconds.add(time.monotonic() - begin)

    def stats(self) -> SlotStats:
        """Counters since the start."""
        return SlotStats(self._seconds.durations(), self.hits, self.misses)

    def _evict(self) -> None:
        """Forget results, the least used first; calls that are not done stay."""
        left = len(self._tickets), sum(cost for _, cost in self._tickets.values())
        for key, (ticket, cost) in list(self._tickets.items()):
            if left[0] <= self._entries and left[1] <= self._costs:
                return
            if ticket.future.done():
                del self._tickets[key]
                left = left[0] - 1, left[1] - cost

    def close(self) -> None:
        """Start no more calls. Idempotent; does not wait for those that run."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)


_STACK_LOCK = threading.Lock()


@contextlib.contextmanager
def _threads_with_stack(size: int) -> Iterator[None]:
    """Threads that start within have stacks of `size` bytes. Python has one size at a time, for all new threads."""
    with _STACK_LOCK:
        before = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(before)
