"""A step: one forward pass over a batch of rows from several sequences, and the same on a device.

Prompt chunks, single decode rows and verification rows mix. Everything that changes from step to step is in arrays, so
that a captured graph can read it from device memory. Nothing derives a position from a slot or from a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device

#: rows in a KV page
PAGE = 64

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: rows [start, start + rows) of the step at positions [position, ...).

    `slot` is the sequence's place in the recurrent states. A span at position 0 starts from a zero state.
    """

    slot: int
    start: int
    rows: int
    position: int


@dataclass(frozen=True)
class PageView:
    """The pages of one page group as the spans of a step see them.

    table  int32 [spans, width]  page numbers, resident pages only, in order of position
    first  int32 [spans, width]  position of each page's first row
    count  int32 [spans]         entries of table and first in use
    dest   int32 [rows]          where each row's K and V are written: page * PAGE + row in the page
    """

    table: Int32
    first: Int32
    count: Int32
    dest: Int32

    @cached_property
    def resident(self) -> tuple[Resident, ...]:
        """What each span sees, for the host: found once a step, read by every layer of the group."""
        return tuple(Resident.of(t[:n], f[:n]) for t, f, n in zip(self.table, self.first, self.count, strict=True))


@dataclass(frozen=True)
class Resident:
    """The pool rows of a span's pages, in order of position: a slice where the pages lie side by side, which the
    allocator aims for, else int32 [keys]. `positions` int32 [keys], None if they are 0, 1, 2, ..."""

    rows: slice | Int32
    positions: Int32 | None

    @classmethod
    def of(cls, pages: Int32, first: Int32) -> Resident:
        """From the page numbers and the position of each page's first row."""
        within = np.arange(PAGE, dtype=np.int32)
        begin = int(pages[0]) if len(pages) else 0
        together = (pages == np.arange(begin, begin + len(pages))).all()
        whole = (first == np.arange(0, len(first) * PAGE, PAGE)).all()
        return cls(
            slice(begin * PAGE, (begin + len(pages)) * PAGE) if together else (pages[:, None] * PAGE + within).ravel(),
            None if whole else (first[:, None] + within).ravel(),
        )


@dataclass(frozen=True)
class Step:
    """tokens, positions: int32 [rows]; views: one per page group of the spec, in its order.

    wanted  int32 [m]  rows whose next token is wanted, ascending
    full    bool [m]   of those, the rows whose whole logits are wanted, not only their argmax
    """

    tokens: Int32
    positions: Int32
    spans: tuple[Span, ...]
    views: tuple[PageView, ...]
    wanted: Int32
    full: NDArray[np.bool_]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)


@dataclass(frozen=True)
class Output:
    """What the last shard returns.

    ids int32 [m] (argmax, lowest id on ties), logits float32 [k, vocab] of the full rows. Fresh arrays in each step.
    """

    ids: Int32
    logits: NDArray[np.float32]


@dataclass
class DeviceStep:
    """A step's arrays on one device, with the shapes that launches need on the host.

    ropes: rotary tables that layers share. lent: by block, float32 [rows, 2 kv_heads head_dim], the rows' keys and then
    their values, of blocks that layers on other devices borrow from.
    """

    device: Device
    step: Step
    ropes: dict[object, Array] = field(default_factory=dict)
    lent: dict[int, Array] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.step.rows

    @cached_property
    def tokens(self) -> Array:
        """int32 [rows]."""
        return self.device.upload(self.step.tokens)

    @cached_property
    def positions(self) -> Array:
        """int32 [rows]."""
        return self.device.upload(self.step.positions)

    @cached_property
    def wanted(self) -> Array:
        """int32 [m]."""
        return self.device.upload(self.step.wanted)

    @cached_property
    def spans(self) -> SpanArrays:
        """The spans as arrays."""
        spans = self.step.spans
        table = np.array([(s.slot, s.start, s.rows, s.position) for s in spans], np.int32).reshape(-1, 4)
        row_span = np.repeat(np.arange(len(spans), dtype=np.int32), table[:, 2])
        return SpanArrays(
            table=self.device.upload(table),
            row_span=self.device.upload(row_span),
            count=len(spans),
            longest=int(table[:, 2].max(initial=0)),
        )

    @cached_property
    def views(self) -> tuple[PageView, ...]:
        """The page views with arrays of this device."""
        up = self.device.upload
        return tuple(PageView(up(v.table), up(v.first), up(v.count), up(v.dest)) for v in self.step.views)


@dataclass(frozen=True)
class SpanArrays:
    """table int32 [spans, 4] with columns slot, start, rows, position; row_span int32 [rows]; longest in rows."""

    table: Array
    row_span: Array
    count: int
    longest: int
