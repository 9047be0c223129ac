"""What a draft remembers of each slot's text: keys and values in rings of pages, which every slot has for itself.

Positions count from the first row that a slot remembers, which need not be the text's first one: attention and rotation
depend on differences only. Rows behind what is remembered may be written too, for as long as nothing else is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luce.runtime.device import Device
from luce.runtime.step import PAGE, DeviceStep, Int32, PageView, Span, Step, StepShape

#: numbers of rows for which kernels differ, up to FEW_ROWS of luce.ops.matmul
WARM_UP_ROWS = (1, 2, 4, 8, 16)
#: most rows of a text that are told at a time
CONTEXT_CHUNK = 512


@dataclass(frozen=True)
class PageRing:
    """The pages of a slot in one page group, used in turn.

    seen  positions before its own that a row sees
    rows  most rows of a slot in one step
    both  whether rows that attend see later ones of their step too
    """

    seen: int
    rows: int
    both: bool = False

    @property
    def pages(self) -> int:
        """How many there are: at any offset, all that the first of `rows` rows sees, and these."""
        return -(-(self.seen + self.rows) // PAGE) + 1

    def low(self, written: int) -> int:
        """The first page that is left when so many rows have been written; below 0 if all are."""
        return (written - 1) // PAGE - self.pages + 1


@dataclass
class _Slot:
    """What is remembered of a sequence: `length` positions from `origin` on.

    written  rows that have been written, those behind too
    lows     of each ring the first page that earlier rows, since rewound, have not overwritten
    """

    lows: list[int]
    origin: int = 0
    length: int = 0
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
        """Sequences that there is room for."""
        return len(self._slots)

    @property
    def reach(self) -> int:
        """Positions before its own that some row sees; earlier ones need not be remembered."""
        return max(ring.seen for ring in self._rings)

    def cached(self, slot: int) -> range:
        """The positions that a slot remembers."""
        state = self._slots[slot]
        return range(state.origin, state.origin + state.length)

    def forget(self, slot: int, position: int = 0) -> None:
        """Remember nothing of a slot; what is remembered next begins at a position."""
        self._slots[slot] = _Slot([0] * len(self._rings), position)

    def rewind(self, slot: int, position: int) -> None:
        """Forget what a slot remembers from a position on."""
        state = self._slots[slot]
        length = position - state.origin
        if length >= state.length:
            return
        lows = [max(low, ring.low(state.written)) for low, ring in zip(state.lows, self._rings, strict=True)]
        # The page that goes on must be there in every ring.
        if length < 0 or max(lows) > length // PAGE:
            self.forget(slot, position)
        else:
            self._slots[slot] = _Slot(lows, state.origin, length, length)

    def resume(self, slot: int, known: int, end: int) -> int:
        """The position from which on a slot has to be told its text again, so that it remembers what rows at `end` see.

        `known`: the first position that can be told. What lies behind `end`, or before a gap, is forgotten.
        """
        self.rewind(slot, end)
        begin = max(self.cached(slot).stop, known, end - self.reach)
        if begin > self.cached(slot).stop:
            self.forget(slot, begin)
        return begin

    def step(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        tokens: Int32,
        wanted: Int32,
        *,
        behind: int = 0,
        sees: bool,
        top: bool = False,
    ) -> Step:
        """counts[i] rows of slots[i], `behind` rows behind what it remembers; the rows are counted as written.

        `sees`: whether they attend, or only keep keys and values. `top`: candidates of the wanted rows are wanted.
        """
        spans: list[Span] = []
        begin = 0
        for slot, rows in zip(slots, counts, strict=True):
            state = self._slots[slot]
            spans.append(Span(slot, begin, rows, state.length + behind))
            state.written = max(state.written, state.length + behind + rows)
            begin += rows

        def views(_: Int32, __: Int32, positions: Int32) -> tuple[PageView, ...]:
            places = np.divmod(positions, np.int32(PAGE))
            return tuple(self._view(index, spans, *places, sees) for index in range(len(self._rings)))

        return Step.of_spans(spans, tokens, views, wanted, needs_candidates=top)

    def empty(self, device: Device, rows: int, spans: int, longest: int, wanted: int, *, sees: bool) -> DeviceStep:
        """A step of this shape, whose arrays are zeros."""
        both = tuple(sees and ring.both for ring in self._rings)
        shape = StepShape(rows, spans, longest, wanted, (1,) * len(self._rings), both)
        return DeviceStep(device, shape, device.zeros(shape.size, np.int32))

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """The next counts[i] rows behind what slots[i] remembers are written, and remembered from now on."""
        for slot, count in zip(slots, counts, strict=True):
            self._slots[slot].length += count

    def _view(self, index: int, spans: Sequence[Span], pages: Int32, within: Int32, sees: bool) -> PageView:
        """The pages of a ring that rows of each span see, or write to: those at `within` of entries `pages`."""
        ring, entries = self._rings[index], []
        for span in spans:
            state = self._slots[span.slot]
            begin = span.position - ring.seen if sees else span.position
            low = max(state.lows[index], ring.low(state.written), begin // PAGE)
            entries.append(np.arange(low, (span.position + span.rows - 1) // PAGE + 1, dtype=np.int32))
        count = np.array([len(own) for own in entries], np.int32)
        first = np.zeros((len(spans), count.max()), np.int32)
        table: Int32 = first.copy()
        dest: Int32 = pages % np.int32(ring.pages)
        for row, (span, own) in enumerate(zip(spans, entries, strict=True)):
            base = np.int32(span.slot * ring.pages)
            first[row, : len(own)] = own * np.int32(PAGE)
            table[row, : len(own)] = base + own % np.int32(ring.pages)
            dest[span.start : span.start + span.rows] += base
        dest *= np.int32(PAGE)
        dest += within
        seen = _joined([_both_ways(span.rows, ring.seen) for span in spans]) if sees and ring.both else None
        return PageView(table=table, first=first, count=count, dest=dest, seen=seen)


@functools.lru_cache
def _both_ways(rows: int, seen: int) -> Int32:
    """Which rows of its span each row sees: all that its window reaches either way. Not to be written to."""
    at = np.arange(rows)
    near = np.abs(at[:, None] - at) < seen
    bits = (near * (np.uint64(1) << at.astype(np.uint64))).sum(axis=1, dtype=np.uint64)
    found: Int32 = bits.astype("<u8").view(np.int32).reshape(-1, 2)
    return found


def _joined(parts: Sequence[Int32]) -> Int32:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
