"""Measures what steps and proposals take before the first reply, so that drafting begins with a table of this device.

Steps of zeros run on slots that no sequence has. The first steps of a shape build kernels and capture graphs, which no
reply has to wait for then. The times that replies take correct the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many

import numpy as np

from luce.backend.backend import Backend
from luce.draft.drafter import Draftable, Drafter
from luce.engine.draft_pace import Pace
from luce.engine.draft_times import FIRST_STEPS
from luce.runtime.step import PAGE, Int32, PageView, Span, Step

_log = logging.getLogger(__name__)

#: returns seconds
Clock = Callable[[], float]
# Steps of a shape: those that do not count, and one that does.
_TIMES = FIRST_STEPS + 1


class CostTable:
    """Measures for a pace, while no sequence runs and no page is in use.

    step_rows, verify_rows  most rows of a step with drafts, and of one of its sequences
    """

    def __init__(
        self, backend: Backend, drafter: Drafter, pace: Pace, step_rows: int, verify_rows: int, clock: Clock
    ) -> None:
        self._backend, self._drafter, self._pace, self._clock = backend, drafter, pace, clock
        self._step_rows, self._block = step_rows, min(drafter.block, verify_rows - 1)
        #: the next position of all slots, and those of them whose last step is still to be accepted
        self._position, self._pending = 0, set[int]()

    def measure(self, seconds: float) -> None:
        """Fill the pace's times, for at most so long and what one step takes. A failure ends it, with a warning."""
        end = self._clock() + seconds
        capacity = self._backend.capacity
        most = min([capacity.slots, *capacity.pages])
        counts = [1 << power for power in range(most.bit_length()) if 1 << power < self._step_rows]
        try:
            for work in (*map(self._plain, counts), *map(self._verified, counts)):
                for _ in work:
                    if self._clock() >= end:
                        return
        except Exception as error:
            _log.warning("the times of steps with drafts are measured while replies run: %s", error)
        finally:
            for slot in range(counts[-1] if counts else 0):
                self._drafter.forget(slot)

    def _plain(self, count: int) -> Iterator[None]:
        """Steps of a row of each sequence, and proposals behind them."""
        self._begin(count)
        for _ in range(_TIMES):
            self._run([1] * count, followed=True)
            yield
            tokens: Int32 = np.zeros(1 + self._position, np.int32)
            asked = [Draftable(slot, tokens, self._block) for slot in range(count)]
            begun = self._clock()
            self._drafter.propose(asked)()
            self._pace.draft_times.add(count, self._clock() - begun)
            yield

    def _verified(self, count: int) -> Iterator[None]:
        """Steps that verify proposals, and those of a row behind them."""
        self._begin(count)
        drafts: list[int] = []
        for number, drafts in enumerate(shapes(count, self._block, self._step_rows, self._pace.sizes)):
            if number and not self._may_pay(count, count + sum(drafts)):
                continue
            for _ in range(_TIMES):
                self._run([1 + own for own in drafts])
                yield
        for _ in range(_TIMES if drafts else 0):
            self._run([1 + own for own in drafts])
            self._run([1] * count)
            yield

    def _may_pay(self, count: int, rows: int) -> bool:
        """Whether a step of so many rows, if that was measured, could pay with all drafts accepted."""
        times, plain = self._pace.step_times, self._pace.step_times(count, count)
        taken = self._pace.draft_times(count) + times(rows, count)
        return not times.measured(rows, count) or rows * plain > count * taken

    def _begin(self, count: int) -> None:
        self._position, self._pending = 0, set()
        for slot in range(count):
            self._drafter.forget(slot)
        self._run([1] * count)

    def _run(self, counts: Many[int], *, followed: bool = False) -> None:
        """A step of so many rows of each slot, of whose last step one row is accepted. `followed`: with a row of each
        behind it, queued meanwhile where the backend can, as the engine does without drafts; that step is measured."""
        drafted = {slot for slot, rows in enumerate(counts) if rows > 1}
        pending, follows = bool(self._pending | drafted), False
        behind = self._step([1] * len(counts), self._position + 1) if followed else None
        begun = self._clock()
        step = self._step(counts, self._position, self._pending)

        def queued() -> None:
            nonlocal follows
            self._drafter.observe(step.spans)
            follows = behind is not None and self._backend.follow(behind)

        self._backend.forward(step, queued)
        if behind is not None and follows:
            begun, self._position = self._clock(), self._position + 1
            self._backend.forward(behind, lambda: self._drafter.observe(behind.spans))
        self._pace.record_time(step.rows, len(counts), max(counts), self._clock() - begun, pending=pending)
        self._position, self._pending = self._position + 1, drafted

    def _step(self, counts: Many[int], position: int, pending: Collection[int] = ()) -> Step:
        spans, start = [], 0
        for slot, rows in enumerate(counts):
            spans.append(Span(slot, start, rows, position, int(slot in pending), speculative=rows > 1))
            start += rows
        return Step.of_spans(spans, np.zeros(start, np.int32), self._views, np.arange(start, dtype=np.int32))

    def _views(self, slots: Int32, row_slots: Int32, positions: Int32) -> tuple[PageView, ...]:
        """One page of each slot, which has its number."""
        table, dest = slots[:, None], (row_slots * PAGE + positions).astype(np.int32)
        view = PageView(table, np.zeros_like(table), np.ones(len(slots), np.int32), dest)
        return (view,) * len(self._backend.capacity.windows)


def shapes(count: int, block: int, step_rows: int, sizes: Collection[int]) -> Iterator[list[int]]:
    """Drafts of each of `count` sequences, one for each shape (luce.runtime.step.StepShape) that choosing among blocks
    of drafts makes: of all rows that `sizes` allows and of one whole block, and of each longest draft, in powers of
    two."""
    for rows in sorted({*(size for size in sizes if size > count), count + block}):
        drafts = rows - count
        for power in range(block.bit_length()):
            longest = min(block, (2 << power) - 1, drafts)
            if rows > step_rows or longest < 1 << power or longest * count < drafts:
                continue
            own = [longest]
            while len(own) < count:
                own.append(min(longest, drafts - sum(own)))
            yield own
