"""A step: one forward pass over a batch of rows from several sequences, and the same on a device.

Prompt chunks, single decode rows and verification rows mix. Everything that changes from step to step is in arrays, so
that a captured graph can read it from device memory. Nothing derives a position from a slot or from a page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device

#: rows in a KV page
PAGE = 64
#: most candidates that a step names for a row's next token
MAX_CANDIDATES = 64
#: most rows of a tree
MAX_TREE_ROWS = 16

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: rows [start, start + rows) of the step at positions [position, ...).

    `slot` is the sequence's place in the recurrent states. A span at position 0 starts from a zero state.

    A speculative span leaves the slot's recurrent states as they were before its first row, and its rows' inputs beside
    them. The slot's next span, or Backend.accept, says how many of them count: it first applies the first `accepted` of
    these rows, and its position is behind the last of them. Speculative spans are not at position 0.

    A tree of up to MAX_TREE_ROWS rows is several speculative spans of a slot, side by side in the step: the first one
    begins with the root, each of the others, a branch, goes on behind rows of earlier ones, its `ancestors`: rows of
    the step from the root to the row that the branch hangs on, so that the branch's position is the root's + their
    number. Of a tree those rows count that `path` names, by their number in it; the first `accepted` ones if it names
    none.
    """

    slot: int
    start: int
    rows: int
    position: int
    accepted: int = 0
    speculative: bool = False
    path: tuple[int, ...] = ()
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True)
class PageView:
    """The pages of one page group as the spans of a step see them.

    table  int32 [spans, width]  page numbers, resident pages only, in order of position
    first  int32 [spans, width]  position of each page's first row
    count  int32 [spans]         entries of table and first in use
    dest   int32 [rows]          where each row's K and V are written: page * PAGE + row in the page
    seen   int32 [rows, 2]       64 bits, the lower 32 first: bit j says that the row sees row j of its span, which has
                                 at most 64 rows and is written at its position + j. None: rows see those before them
    copies int32 [m, 2]          pool rows that are copied, from where to where, when the step's K and V are written:
                                 to pages that only one branch of a tree sees. No place is read and written; -1: none
    """

    table: Int32
    first: Int32
    count: Int32
    dest: Int32
    seen: Int32 | None = None
    copies: Int32 | None = None

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


#: Gets int32 [spans] the slot of each span, int32 [rows] the slot of each row, int32 [rows] the position of each row,
#: and returns the view of each page group.
ViewBuilder = Callable[[Int32, Int32, Int32], tuple[PageView, ...]]


@dataclass(frozen=True)
class Step:
    """tokens, positions: int32 [rows]; views: one per page group of the spec, in its order.

    Rows that go on with replies come before those of prompts, so that they can run without
    them (luce.backend.microbatch).

    output_rows       int32 [m]  rows whose next token is wanted, ascending
    needs_logits      bool [m]   of those, the rows whose whole logits are wanted, not only their argmax
    needs_candidates  bool [m]   and the rows whose candidates are wanted; None: of none
    """

    tokens: Int32
    positions: Int32
    spans: tuple[Span, ...]
    views: tuple[PageView, ...]
    output_rows: Int32
    needs_logits: NDArray[np.bool_]
    needs_candidates: NDArray[np.bool_] | None = None

    @classmethod
    def of_spans(
        cls,
        spans: Sequence[Span],
        tokens: Sequence[int] | Int32,
        views: ViewBuilder | tuple[PageView, ...],
        output_rows: Sequence[int] | Int32 = (),
        *,
        needs_logits: bool | Sequence[bool] | NDArray[np.bool_] = False,
        needs_candidates: bool | Sequence[bool] | NDArray[np.bool_] = False,
    ) -> Step:
        """The step of these spans, which lie side by side in the order of their rows.

        A bool for `needs_logits` or `needs_candidates` holds for all output rows. Every caller that makes a step makes
        it here, so that positions and dtypes come from one place.
        """
        slots: Int32 = np.array([span.slot for span in spans], np.int32)
        positions: Int32 = np.array([span.position for span in spans], np.int32)
        row_slots = slots
        if len(spans) < len(tokens):
            rows: Int32 = np.array([span.rows for span in spans], np.int32)
            starts: Int32 = np.array([span.start for span in spans], np.int32)
            row_slots = np.repeat(slots, rows)
            positions = np.repeat(positions - starts, rows) + np.arange(len(row_slots), dtype=np.int32)
        outputs: Int32 = np.asarray(output_rows, np.int32)
        return cls(
            tokens=np.asarray(tokens, np.int32),
            positions=positions,
            spans=tuple(spans),
            views=views(slots, row_slots, positions) if callable(views) else views,
            output_rows=outputs,
            needs_logits=_mask(needs_logits, len(outputs)),
            needs_candidates=None if needs_candidates is False else _mask(needs_candidates, len(outputs)),
        )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)


def _mask(value: bool | Sequence[bool] | NDArray[np.bool_], rows: int) -> NDArray[np.bool_]:
    return np.full(rows, value, np.bool_) if isinstance(value, bool) else np.asarray(value, np.bool_)


@dataclass(frozen=True)
class Candidates:
    """The largest logits of some rows, in order: ids int32 [t, min(MAX_CANDIDATES, vocab)], logits float32 of the same
    shape.

    The lower id first among equals; NaN comes before all numbers. norms float32 [t], if asked for: the log of the sum
    of exp over the row's whole vocabulary.
    """

    ids: Int32
    logits: NDArray[np.float32]
    norms: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Output:
    """What the last shard returns.

    ids int32 [m] (argmax, lowest id on ties), logits float32 [k, vocab] and candidates of the rows that need them.
    Fresh arrays in each step.
    """

    ids: Int32
    logits: NDArray[np.float32]
    candidates: Candidates | None = None

    @classmethod
    def joined(cls, outputs: Sequence[Output]) -> Output:
        """The output of a step whose pieces had these outputs, at least one."""
        ids, logits = (np.concatenate([getattr(output, part) for output in outputs]) for part in ("ids", "logits"))
        tops = [output.candidates for output in outputs if output.candidates is not None]
        if not tops:
            return cls(ids, logits)
        return cls(ids, logits, Candidates(*(np.concatenate([getattr(t, p) for t in tops]) for p in ("ids", "logits"))))


@dataclass(frozen=True)
class StepShape:
    """What the launches of a step may depend on besides the contents of device memory.

    Numbers of rows, spans and output rows; rows of the longest span; width of each view's table, and whether the view
    says which rows of a span are seen; whether a span is speculative or accepts rows; whether there are trees, or paths
    of them, and each view's copies. With trees `longest` may be more than it is.
    """

    rows: int
    spans: int
    longest: int
    output_rows: int
    widths: tuple[int, ...]
    seen: tuple[bool, ...]
    pending: bool = False
    branching: bool = False
    copies: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: Step) -> StepShape:
        """The shape of a step as it is."""
        longest = max((span.rows for span in step.spans), default=0)
        widths = tuple(view.table.shape[1] for view in step.views)
        seen = tuple(view.seen is not None for view in step.views)
        pending = any(span.speculative or span.accepted for span in step.spans)
        branching = any(span.path or span.ancestors for span in step.spans)
        if any(span.ancestors for span in step.spans):
            # Trees of all forms shall have few shapes.
            longest = 1 << (longest - 1).bit_length()
        copies = tuple(0 if view.copies is None else len(view.copies) for view in step.views)
        return cls(step.rows, len(step.spans), longest, len(step.output_rows), widths, seen, pending, branching, copies)

    @cached_property
    def size(self) -> int:
        """int32 values that the arrays take together."""
        return sum(_padded(math.prod(shape)) for shape in self._shapes)

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        rows, spans = (self.rows,), (self.spans,)
        shapes = [rows, rows, (self.output_rows,), (*spans, 4), (*spans, 2), rows]
        shapes += [(*spans, 2, 1 + MAX_TREE_ROWS)] if self.branching else []
        for width, seen, copies in itertools.zip_longest(self.widths, self.seen, self.copies, fillvalue=0):
            shapes += [(*spans, width), (*spans, width), spans, rows, *([(*rows, 2)] if seen else [])]
            shapes += [(copies, 2)] if copies else []
        return tuple(shapes)

    def cut(self, memory: Array) -> list[Array]:
        """int32 [size], on whatever device, as the arrays of a step in the order of DeviceStep."""
        arrays, at = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            arrays.append(memory[at : at + size].reshape(shape))
            at += _padded(size)
        return arrays


def _padded(size: int) -> int:
    # Arrays begin at 256 bytes, as if they were allocated one by one.
    return -(-size // 64) * 64


@dataclass(frozen=True)
class SpanArrays:
    """table int32 [spans, 4] with columns slot, start, rows, position; row_span int32 [rows]; longest in rows; pending
    int32 [spans, 2] with columns accepted, speculative, None if they are all zeros; branches int32 [spans, 2, 1 +
    MAX_TREE_ROWS], how many there are and then the rows themselves: those that are accepted, which are never left out
    here, and those that the span is behind; None if there are no trees."""

    table: Array
    row_span: Array
    count: int
    longest: int
    pending: Array | None = None
    branches: Array | None = None


class DeviceStep:
    """A step's arrays on one device, with the shape that launches need on the host.

    tokens, positions: int32 [rows]; output_rows: int32 [m]. ropes: rotary tables that layers share. lent: by block,
    float32 [rows, 2 kv_heads head_dim], the rows' keys and then their values, of blocks that layers on other devices
    borrow from.
    """

    def __init__(self, device: Device, shape: StepShape, memory: Array) -> None:
        """The arrays of a step of `shape` that are, or will be, in `memory`, int32 [shape.size] on the device."""
        self.device = device
        self.shape = shape
        self.tokens, self.positions, self.output_rows, table, pending, row_span, *rest = shape.cut(memory)
        arrays = iter(rest)
        branches = next(arrays) if shape.branching else None
        self.spans = SpanArrays(
            table, row_span, shape.spans, shape.longest, pending if shape.pending else None, branches
        )
        views = []
        for seen, copies in itertools.zip_longest(shape.seen, shape.copies, fillvalue=0):
            table, first, count, dest = itertools.islice(arrays, 4)
            bits, pairs = next(arrays) if seen else None, next(arrays) if copies else None
            views.append(PageView(table, first, count, dest, bits, pairs))
        self.views = tuple(views)
        self.ropes: dict[object, Array] = {}
        self.lent: dict[int, Array] = {}

    @classmethod
    def upload(cls, device: Device, step: Step) -> DeviceStep:
        """A step in new memory of the device."""
        shape = StepShape.of(step)
        memory = np.empty(shape.size, np.int32)
        write_step(step, shape.cut(memory))
        return cls(device, shape, device.upload(memory))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape.rows


def write_step(step: Step, arrays: Sequence[Int32]) -> None:
    """Write a step to what StepShape.cut made of host memory. The shape's tables may be wider than the step's."""
    table: Int32 = np.array([(s.slot, s.start, s.rows, s.position) for s in step.spans], np.int32).reshape(-1, 4)
    pending: Int32 = np.array([(s.accepted, s.speculative) for s in step.spans], np.int32).reshape(-1, 2)
    row_span = np.repeat(np.arange(len(table), dtype=np.int32), table[:, 2])
    values = [step.tokens, step.positions, step.output_rows, table, pending, row_span]
    if any(span.path or span.ancestors for span in step.spans):
        values.append(branches_of(step.spans))
    for view in step.views:
        values += [view.table, view.first, view.count, view.dest, *([] if view.seen is None else [view.seen])]
        values += [] if view.copies is None or not len(view.copies) else [view.copies]
    for array, value in zip(arrays, values, strict=True):
        array[..., : value.shape[-1]] = value


def branches_of(spans: Sequence[Span]) -> Int32:
    """SpanArrays.branches."""
    branches = np.zeros((len(spans), 2, 1 + MAX_TREE_ROWS), np.int32)
    for own, span in zip(branches, spans, strict=True):
        for to, rows in zip(own, (span.path or range(span.accepted), span.ancestors), strict=True):
            to[: 1 + len(rows)] = [len(rows), *rows]
    return branches
