"""The masks of a step's constrained rows, made on threads while the devices work on its layers.

A mask depends on tokens that are known before the step: the reply so far and its draft. So the threads begin when the
step is scheduled, one task for each sequence, and whoever computes the step's output waits for them once the layers are
queued. That thread has nothing else to do by then, and takes tasks that no other thread has begun. It takes the task of
a single sequence too: to wake another thread costs 50 us of the engine's time before the layers are queued, and as much
again where the two threads want the interpreter at once.

What goes wrong with one sequence's masks ends its reply alone: the step goes on, and the reply fails when its output is
committed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.engine.scheduler import ScheduledSequence, ScheduledStep
from luce.engine.sequence import Constraint, RowKind, Sequence
from luce.errors import GrammarLimitError
from luce.runtime.step import Int32, PendingMasks, RowMasks
from luce.shard.timing import Durations, Histogram

# A step waits at most so many times --grammar-mask-ms for the masks of a sequence. The limit itself is for the time
# that a thread computes; this one also holds where the machine has no core for the thread.
_PATIENCE = 40
# Slow tasks of a reply that end it.
_MAX_SLOW = 2
# Rows of these kinds have a mask.
_MASKED = (RowKind.FREE, RowKind.MADE)


def default_threads() -> int:
    """Threads that make masks."""
    return max(1, min(4, (os.cpu_count() or 1) // 4))


@dataclass(frozen=True)
class MaskStats:
    """Counters since the start."""

    #: rows by kind
    rows: dict[str, int]
    #: seconds of each sequence's masks in a step
    made: Durations
    #: seconds that each step with masks waited for them, its layers being queued
    waits: Durations


class Masker:
    """Makes masks for an engine.

    `vocab`: logits of a row. `threads`: 0 for as many as the machine's cores allow. `limit`: seconds that the mask of
    a row may take; a reply whose masks take longer for the second time fails.
    """

    def __init__(self, vocab: int, *, threads: int = 0, limit: float = 0.05) -> None:
        self._words = -(-vocab // 32)
        self._threads = threads or default_threads()
        self._limit = limit
        self._pool: ThreadPoolExecutor | None = None
        self._rows: Counter[RowKind] = Counter()
        self._made, self._waits = Histogram(), Histogram()

    def begin(self, scheduled: ScheduledStep) -> StepMasks | None:
        """Begin the masks of a step; None if none of its rows may need one."""
        found = [(one, sequence.constraint) for one in scheduled.sequences if (sequence := one.sequence).constraint]
        tasks: dict[Sequence, _Task] = {}
        count = 0
        for one, constraint in found:
            rows = _rows(one)
            if constraint is None or not rows:
                continue
            if constraint.open and rows == 1:
                self._rows[RowKind.OPEN] += 1
                continue
            tasks[one.sequence] = _Task(one, constraint, range(count, count + rows))
            count += rows
        if not tasks:
            return None
        made = StepMasks(tasks, np.empty((count, self._words), np.uint32), self._limit, self._note)
        if len(tasks) > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "luce-grammar")
            made.start(self._pool, self._threads)
        return made

    def stats(self) -> MaskStats:
        """Counters. Any thread may ask."""
        rows = {kind.value: self._rows[kind] for kind in RowKind}
        return MaskStats(rows, self._made.durations(), self._waits.durations())

    def close(self) -> None:
        """Release the threads, which end when their masks are made. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _note(self, masks: StepMasks, seconds: float) -> None:
        self._waits.add(seconds)
        for task in masks.tasks.values():
            self._made.add(task.seconds)
            self._rows.update(task.kinds)


class _Task:
    """The masks of one sequence in a step: of the rows from which a token may be chosen."""

    def __init__(self, one: ScheduledSequence, constraint: Constraint, places: range) -> None:
        self._constraint = constraint
        self._draft = one.draft
        self._ends = one.sequence.ends
        self.sequence = one.sequence
        #: its rows of the step's masks
        self.places = places
        #: its rows of the step's output
        self.outputs = range(one.ids.stop - len(places), one.ids.stop)
        #: whether the device masks these rows; the host masks rows of whole logits
        self.on_device = one.logits.stop == one.logits.start
        self.kinds: list[RowKind] = []
        #: the kind of each row, and its mask if it has one
        self.rows: list[tuple[RowKind, NDArray[np.uint32] | None]] = []
        self.error: Exception | None = None
        #: what the thread computed
        self.seconds = 0.0
        self.done = False

    def run(self, words: NDArray[np.uint32]) -> None:
        """Make the masks; any thread."""
        begun = time.thread_time()
        draft = self._draft
        try:
            parents = [row - 1 for row in draft.parents]
            self.kinds = self._constraint.fill(draft.tokens, parents, self._ends, words)
        except Exception as error:
            self.error = error
        self.seconds = time.thread_time() - begun
        self.done = True


class StepMasks(PendingMasks):
    """The masks of a step.

    `tasks` by sequence; `words` uint32 [rows, words]; `limit` as of Masker. `note` is called once, by whoever waits.
    """

    def __init__(
        self,
        tasks: dict[Sequence, _Task],
        words: NDArray[np.uint32],
        limit: float,
        note: Callable[[StepMasks, float], None],
    ) -> None:
        self.tasks = tasks
        self._words = words
        self._limit = limit
        self._note = note
        self._waiting = deque(tasks.values())
        self._jobs: list[Future[None]] = []
        self._lock = threading.Lock()
        self._made: RowMasks | None = None

    def start(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Let the threads of a pool begin."""
        self._jobs = [pool.submit(self._work) for _ in range(min(threads, len(self.tasks)))]

    @property
    def made(self) -> bool:
        """Whether the masks are there, so that no thread uses the constraints any more."""
        return self._made is not None

    def wait(self) -> RowMasks:
        with self._lock:
            if self._made is None:
                self._made = self._finish()
            return self._made

    def of(self, one: ScheduledSequence) -> list[tuple[RowKind, NDArray[np.uint32] | None]]:
        """The kind of each output row of a sequence, and its mask; the last rows if only these have one, [] if none.

        Raises what making them raised, and GrammarLimitError if they took too long.
        """
        task = self.tasks.get(one.sequence)
        if task is None:
            return []
        self.wait()
        if task.error is not None:
            raise task.error
        return task.rows

    def _work(self) -> None:
        while True:
            try:
                task = self._waiting.popleft()
            except IndexError:
                return
            task.run(self._words[task.places.start : task.places.stop])

    def _finish(self) -> RowMasks:
        begun = time.perf_counter()
        self._work()
        # Nothing is left for threads that have not begun; others may be in the middle of a task.
        running = [job for job in self._jobs if not job.cancel()]
        if not all(task.done for task in self.tasks.values()):
            wait(running, timeout=_PATIENCE * self._limit)
        chosen: list[int] = []
        outputs: list[int] = []
        for task in self.tasks.values():
            self._judge(task)
            if task.error is not None:
                continue
            # The devices work meanwhile; when the step's output is there, they wait for the engine's thread.
            own = self._words[task.places.start : task.places.stop]
            task.rows = [(kind, w if kind in _MASKED else None) for kind, w in zip(task.kinds, own, strict=True)]
            if task.on_device:
                masked = [row for row, kind in enumerate(task.kinds) if kind in _MASKED]
                chosen += [task.places[row] for row in masked]
                outputs += [task.outputs[row] for row in masked]
        rows: Int32 = np.array(outputs, np.int32)
        words = self._words if len(chosen) == len(self._words) else self._words[chosen]
        self._note(self, time.perf_counter() - begun)
        return RowMasks(rows, words)

    def _judge(self, task: _Task) -> None:
        """Let a reply whose masks take too long fail."""
        milliseconds, rows = 1e3 * self._limit, len(task.places)
        if not task.done:
            task.error = GrammarLimitError(f"a mask takes more than {_PATIENCE * milliseconds:g} ms")
        elif task.seconds > self._limit * rows:
            task.sequence.slow_masks += 1
            if task.sequence.slow_masks >= _MAX_SLOW:
                task.error = GrammarLimitError(f"masks take more than {milliseconds:g} ms (--grammar-mask-ms)")


def _rows(one: ScheduledSequence) -> int:
    """How many of a sequence's last rows in a step may have a token of the reply chosen from them."""
    sequence, end = one.sequence, one.sequence.read_end
    if one.position >= end:
        return one.rows
    ends = one.position + one.rows >= end and one.ids.stop > one.ids.start
    return int(ends and sequence.max_new_tokens > 0 and not sequence.reply)
