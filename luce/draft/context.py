"""The context of a draft: the keys and values of each slot's text, in rings of pages that belong to the slot.

Positions count from the first row that a slot has cached, which need not be the text's first one: attention and
rotation depend on differences only. Rows behind the cached ones may be written too; the next rows overwrite them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from luce.ops.matmul import FEW_ROWS
from luce.runtime.device import Device
from luce.runtime.step import PAGE, DeviceStep, Int32, PageView, Span, Step, StepShape

#: numbers of rows for which kernels differ, up to FEW_ROWS, and of steps that append so few rows
WARM_UP_ROWS = (1, 2, 4, 8, FEW_ROWS)
#: most rows of a text in one step that appends context
CONTEXT_CHUNK = 512


@dataclass(frozen=True)
class PageRing:
    """The pages of a slot in one page group, used in turn."""

    #: positions before its own that a row sees
    seen: int
    #: most rows of a slot in one step
    rows: int
    #: rows that attend see later rows of their step too
    both: bool = False

    @property
    def pages(self) -> int:
        """Number of pages: enough, at any offset, for `rows` rows and all that the first of them sees."""
        return -(-(self.seen + self.rows) // PAGE) + 1

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.pages * PAGE

    def low(self, written: int) -> int:
        """The first page that `written` rows have not overwritten; below 0 if that is all of them."""
        return (written - 1) // PAGE - self.pages + 1


@dataclass
class _Slot:
    """The cached positions of a sequence: `length` of them, from `origin` on."""

    #: of each ring the first page that earlier rows, since rewound, have not overwritten
    lows: list[int]
    origin: int = 0
    length: int = 0
    #: rows written, including those behind the cached ones
    written: int = 0


class Context:
    """The rings of `slots` sequences. Slot s has the pages from s * ring.pages on of each group's pool."""

    def __init__(self, rings: Sequence[PageRing], slots: int) -> None:
        self._rings = tuple(rings)
        self._slots = [_Slot([0] * len(self._rings)) for _ in range(slots)]

    @property
    def pages(self) -> list[int]:
        """Pages of each group."""
        return [len(self._slots) * ring.pages for ring in self._rings]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._slots)

    @property
    def reach(self) -> int:
        """Positions before its own that some row sees; earlier ones need not be cached."""
        return max(ring.seen for ring in self._rings)

    def cached(self, slot: int) -> range:
        """The cached positions of a slot."""
        state = self._slots[slot]
        return range(state.origin, state.origin + state.length)

    def forget(self, slot: int, position: int = 0) -> None:
        """Drop a slot's cached positions; the next rows begin at a position."""
        self._slots[slot] = _Slot([0] * len(self._rings), position)

    def rewind(self, slot: int, position: int) -> None:
        """Drop a slot's cached positions from a position on."""
        state = self._slots[slot]
        length = position - state.origin
        if length >= state.length:
            return
        lows = [max(low, ring.low(state.written)) for low, ring in zip(state.lows, self._rings, strict=True)]
        # Every ring must still have the page in which the next row is written.
        if length < 0 or max(lows) > length // PAGE:
            self.forget(slot, position)
        else:
            self._slots[slot] = _Slot(lows, state.origin, length, length)

    def resume(self, slot: int, available: int, end: int) -> int:
        """The position from which a slot's text must be appended again, so that the cache holds what rows at `end` see.

        `available`: the first position that can be appended. Cached positions from `end` on, and those before a gap,
        are dropped.
        """
        self.rewind(slot, end)
        begin = max(self.cached(slot).stop, available, end - self.reach)
        if begin > self.cached(slot).stop:
            self.forget(slot, begin)
        return begin

    def step(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        tokens: Int32,
        output_rows: Int32,
        *,
        behind: int = 0,
        candidates: bool = False,
    ) -> Step:
        """counts[i] rows of slots[i], `behind` rows behind its cached positions; the rows count as written.

        `candidates`: the output rows need candidates.
        """
        spans: list[Span] = []
        begin = 0
        for slot, rows in zip(slots, counts, strict=True):
            state = self._slots[slot]
            spans.append(Span(slot, begin, rows, state.length + behind))
            state.written = max(state.written, state.length + behind + rows)
            begin += rows

        def views(slots: Int32, row_slots: Int32, positions: Int32) -> tuple[PageView, ...]:
            return tuple(self._view(index, spans, slots, row_slots, positions) for index in range(len(self._rings)))

        return Step.of_spans(spans, tokens, views, output_rows, needs_candidates=candidates)

    def append_step(self, slots: Sequence[int], counts: Sequence[int], tokens: Int32) -> Step:
        """The next counts[i] rows of slots[i], which only write keys and values, and then count as written.

        tokens int32 [n], n >= sum(counts): what is more are further rows of the last slot. The step is one span,
        whatever the slots: such rows read nothing but their positions and the places they go to.
        """
        whole = [*counts[:-1], counts[-1] + len(tokens) - sum(counts)]
        states = [self._slots[slot] for slot in slots]
        positions = np.concatenate([np.arange(s.length, s.length + n) for s, n in zip(states, whole, strict=True)])
        for state, count in zip(states, whole, strict=True):
            state.written = max(state.written, state.length + count)
        of_row, table = np.repeat(slots, whole), np.zeros((1, 1), np.int32)
        views = []
        for ring in self._rings:
            dest = of_row * ring.size + positions % ring.size
            views.append(PageView(table, table, np.ones(1, np.int32), dest.astype(np.int32)))
        # The step needs no output row, but only steps with output rows are replayed.
        step = Step.of_spans([Span(slots[0], 0, len(tokens), 0)], tokens, tuple(views), np.zeros(1, np.int32))
        return replace(step, positions=positions.astype(np.int32))

    def empty(
        self, device: Device, rows: int, spans: int, longest: int, output_rows: int, *, attends: bool
    ) -> DeviceStep:
        """A step of this shape, whose arrays are zeros. `attends`: as of `step`, or as of `append_step`."""
        both = tuple(attends and ring.both for ring in self._rings)
        shape = StepShape(rows, spans, longest, output_rows, (1,) * len(self._rings), both)
        return DeviceStep(device, shape, device.zeros(shape.size, np.int32))

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """The next counts[i] rows of slots[i], which have been written, are cached from now on."""
        for slot, count in zip(slots, counts, strict=True):
            self._slots[slot].length += count

    def _view(self, index: int, spans: Sequence[Span], slots: Int32, row_slots: Int32, positions: Int32) -> PageView:
        """The pages of a ring that rows of each span see or write. Behind `count` entries of a span come any."""
        ring, begins, counts = self._rings[index], [], []
        for span in spans:
            state = self._slots[span.slot]
            low = max(state.lows[index], ring.low(state.written), (span.position - ring.seen) // PAGE)
            begins.append(low)
            counts.append((span.position + span.rows - 1) // PAGE + 1 - low)
        entries: Int32 = np.add.outer(np.array(begins, np.int32), np.arange(max(counts), dtype=np.int32))
        table = entries % np.int32(ring.pages)
        table += (slots * np.int32(ring.pages))[:, None]
        dest = positions % np.int32(ring.size)
        dest += row_slots * np.int32(ring.size)
        seen = _joined([_both_ways(span.rows, ring.seen) for span in spans]) if ring.both else None
        return PageView(table, entries * np.int32(PAGE), np.array(counts, np.int32), dest, seen)


def of_few_sizes(rows: Int32) -> Int32:
    """Rows to append, int32 [n], for steps of a few shapes: up to FEW_ROWS of them become a power of two, the last one
    repeated."""
    size = 1 << (len(rows) - 1).bit_length()
    return np.pad(rows, (0, size - len(rows)), "edge") if len(rows) <= FEW_ROWS else rows


@functools.lru_cache
def _both_ways(rows: int, seen: int) -> Int32:
    """The rows of its span that each row sees: all that its window reaches either way. Shared; never written to."""
    at = np.arange(rows)
    near = np.abs(at[:, None] - at) < seen
    bits = (near * (np.uint64(1) << at.astype(np.uint64))).sum(axis=1, dtype=np.uint64)
    found: Int32 = bits.astype("<u8").view(np.int32).reshape(-1, 2)
    return found


def _joined(parts: Sequence[Int32]) -> Int32:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
