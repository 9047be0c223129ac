"""What a draft remembers of each slot's text: keys and values in rings of pages, which every slot has for itself.

Positions count from the first row that a slot remembers, which need not be the text's first one: attention and rotation
depend on differences only. Rows behind what is remembered may be written too, for as long as nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luce.runtime.device import Device
from luce.runtime.step import PAGE, DeviceStep, Int32, PageView, Span, Step, StepShape

#: numbers of rows for which kernels differ, up to FEW_ROWS of luce.ops.matmul
KINDS_OF_ROWS = (1, 2, 4, 8, 16)
#: most rows of a text that are told at a time
PIECE = 512


@dataclass(frozen=True)
class Ring:
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

    def __init__(self, rings: Sequence[Ring], slots: int) -> None:
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

    def remembered(self, slot: int) -> range:
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
        begin = max(self.remembered(slot).stop, known, end - self.reach)
        if begin > self.remembered(slot).stop:
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
        starts = [self._slots[slot].length + behind for slot in slots]
        begins = np.cumsum([0, *counts])
        spans = tuple(map(Span, slots, begins.tolist(), counts, starts))
        positions = np.concatenate(
            [np.arange(at, at + n, dtype=np.int32) for at, n in zip(starts, counts, strict=True)]
        )
        for span in spans:
            state = self._slots[span.slot]
            state.written = max(state.written, span.position + span.rows)
        return Step(
            tokens=tokens,
            positions=positions,
            spans=spans,
            views=tuple(self._view(index, spans, positions, sees) for index in range(len(self._rings))),
            wanted=wanted,
            full=np.zeros(len(wanted), np.bool_),
            top=np.ones(len(wanted), np.bool_) if top else None,
        )

    def empty(self, device: Device, rows: int, spans: int, longest: int, wanted: int, *, sees: bool) -> DeviceStep:
        """A step of this shape, whose arrays are zeros."""
        both = tuple(sees and ring.both for ring in self._rings)
        shape = StepShape(rows, spans, longest, wanted, (1,) * len(self._rings), both)
        return DeviceStep(device, shape, device.zeros(shape.size, np.int32))

    def keep(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """The next counts[i] rows behind what slots[i] remembers are written, and remembered from now on."""
        for slot, count in zip(slots, counts, strict=True):
            self._slots[slot].length += count

    def _view(self, index: int, spans: Sequence[Span], positions: Int32, sees: bool) -> PageView:
        """The pages of a ring that rows of each span see, or write to."""
        ring, lows, highs = self._rings[index], [], []
        for span in spans:
            state = self._slots[span.slot]
            first = (span.position - ring.seen if sees else span.position) // PAGE
            lows.append(max(state.lows[index], ring.low(state.written), first))
            highs.append((span.position + span.rows - 1) // PAGE + 1)
        count = np.array(highs, np.int32) - np.array(lows, np.int32)
        entries = np.array(lows, np.int32)[:, None] + np.arange(count.max(), dtype=np.int32)
        base = np.array([span.slot * ring.pages for span in spans], np.int32)
        own = np.repeat(base, [span.rows for span in spans])
        return PageView(
            table=base[:, None] + entries % ring.pages,
            first=entries * PAGE,
            count=count,
            dest=(own + positions // PAGE % ring.pages) * PAGE + positions % PAGE,
            seen=_both_ways(spans, ring) if sees and ring.both else None,
        )


def _both_ways(spans: Sequence[Span], ring: Ring) -> Int32:
    """Which rows of its span each row sees: all that its window reaches either way."""
    rows = []
    for span in spans:
        at = np.arange(span.rows)
        near = np.abs(at[:, None] - at) < ring.seen
        bits = (near * (np.uint64(1) << at.astype(np.uint64))).sum(axis=1, dtype=np.uint64)
        rows.append(bits.astype("<u8").view(np.int32).reshape(-1, 2))
    return np.concatenate(rows)
