"""A step: one forward pass over a batch of rows from several sequences, and the same on a device.

Prompt chunks, single decode rows and verification rows mix. Everything that changes from step to step is in arrays, so
that a captured graph can read it from device memory. Nothing derives a position from a slot or from a page.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device, Fetched
from luce.runtime.draws import RowDraws

#: rows in a KV page
PAGE = 64
#: most candidates of a row, which the device finds
MAX_CANDIDATES = 64
#: most rows of a draft tree
MAX_TREE_ROWS = 16
# The values of StepShape.pages: few shapes, and attention has places for all pages from 64 on.
_PAGES = (8, 16, 32)
#: a position id of at least so much is one of a stretched sequence, and this number above its position
STRETCHED = 1 << 24

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: rows [start, start + rows) of the step at positions [position, ...).

    A span at position 0 starts from zero recurrent states.

    A speculative span leaves the slot's recurrent states as they were before its first row, and stores the inputs of
    its rows beside them. The slot's next span, or Backend.accept, says which of these rows are accepted: the states are
    taken through them first, and the next span's position follows the last of them. Speculative spans are not at
    position 0.

    A draft tree of up to MAX_TREE_ROWS rows is several speculative spans of a slot, side by side in the step. The first
    span begins with the root. Each other span is a branch that goes on after rows of earlier spans, its `ancestors`;
    its position is the root's position plus their number.
    """

    #: the sequence's place in every shard
    slot: int
    start: int
    rows: int
    position: int
    #: rows of the slot's speculative span before this one that are accepted
    accepted: int = 0
    speculative: bool = False
    #: the accepted rows by their number in the tree before this span; empty: its first `accepted` rows
    path: tuple[int, ...] = ()
    #: of a branch, rows of the step from the root to the parent of the branch's first row
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True)
class PageView:
    """The pages of one page group as the spans of a step see them."""

    #: int32 [spans, width]: page numbers, resident pages only, in order of position
    table: Int32
    #: int32 [spans, width]: position of each page's first row
    first: Int32
    #: int32 [spans]: entries of table and first in use
    count: Int32
    #: int32 [rows]: where each row's K and V are written: page * PAGE + row in the page
    dest: Int32
    #: int32 [rows, 2]: 64 bits, the lower 32 first. Bit j says that the row sees row j of its span, which has at most
    #: 64 rows and is written at its position + j. None: rows see the rows before them
    seen: Int32 | None = None
    #: int32 [m, 2]: pool rows (from, to) that are copied when the step's K and V are written, to pages that only one
    #: branch of a draft tree sees. No row is both read and written; -1: no copy
    copies: Int32 | None = None

    @cached_property
    def resident(self) -> tuple[Resident, ...]:
        """The pool rows of each span for the NumPy ops: made once a step, read by every layer of the group."""
        return tuple(Resident.of(t[:n], f[:n]) for t, f, n in zip(self.table, self.first, self.count, strict=True))


@dataclass(frozen=True)
class Resident:
    """The pool rows of a span's pages, in order of position."""

    #: a slice where the pages lie side by side, which the allocator aims for, else int32 [keys]
    rows: slice | Int32
    #: int32 [keys]; None if the positions are 0, 1, 2, ...
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
class RowMasks:
    """Which tokens may come next in some output rows, ascending."""

    #: int32 [k]: numbers of output rows
    rows: Int32
    #: uint32 [k, words]: bit t % 32 of word t / 32 is set if token t may come; tokens behind the last word may not
    words: NDArray[np.uint32]


class PendingMasks(ABC):
    """The masks of a step, which are made while the devices work on the step's layers."""

    @abstractmethod
    def wait(self) -> RowMasks:
        """The masks. Whoever computes the output waits for them once the layers are queued. Any thread may call it."""

    def part(self, chosen: NDArray[np.bool_]) -> PendingMasks:
        """The masks of these output rows only, bool [m], numbered anew."""
        return _PartOfMasks(self, chosen)


class MadeMasks(PendingMasks):
    """Masks that are there."""

    def __init__(self, masks: RowMasks) -> None:
        self._masks = masks

    def wait(self) -> RowMasks:
        return self._masks


class _PartOfMasks(PendingMasks):
    def __init__(self, whole: PendingMasks, chosen: NDArray[np.bool_]) -> None:
        self._whole = whole
        self._chosen = chosen

    def wait(self) -> RowMasks:
        whole = self._whole.wait()
        own = self._chosen[whole.rows]
        numbers = (np.cumsum(self._chosen) - 1).astype(np.int32)
        return RowMasks(numbers[whole.rows[own]], whole.words[own])


@dataclass(frozen=True)
class Step:
    """One forward pass over rows of several sequences.

    Rows that continue replies come before rows of prompts, so that they can run without them
    (luce.backend.microbatch).
    """

    #: int32 [rows]
    tokens: Int32
    #: int32 [rows]
    positions: Int32
    spans: tuple[Span, ...]
    #: one per page group of the spec, in its order
    views: tuple[PageView, ...]
    #: int32 [m]: rows that Output has a next token of, ascending
    output_rows: Int32
    #: bool [m]: output rows that need their whole logits, not only their argmax
    needs_logits: NDArray[np.bool_]
    #: bool [m]: output rows that need their candidates; None: no row does
    needs_candidates: NDArray[np.bool_] | None = None
    #: how the output rows' tokens are drawn, from at most MAX_CANDIDATES; None: each is the argmax
    draws: RowDraws | None = None
    #: which tokens may come next: the argmax, the candidates and the drawn tokens of these rows are among them. Rows
    #: that need their whole logits have no mask here. None: any token may come
    masks: PendingMasks | None = None
    #: int32 [rows]: positions that rotary embeddings take, where a prompt keeps those of the longer text that it is a
    #: part of, or a sequence is stretched; pages, windows and the order of rows follow `positions`. None: they are
    #: `positions`
    position_ids: Int32 | None = None
    #: int32 [rows]: the tokens, where a device still chooses them; then `tokens` means nothing. None: `tokens` has them
    future_tokens: Fetched | None = None
    #: whether masks depend on `future_tokens`: the shards queue the step's layers first, and its output when the masks
    #: are there (luce.shard.shard.DeferredOutput)
    masks_deferred: bool = False

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
        if len(spans) == 1:
            # The device waits for the draft's step, and each of these calls takes microseconds.
            begin = spans[0].position
            row_slots = np.full(len(tokens), spans[0].slot, np.int32)
            positions = np.arange(begin, begin + len(tokens), dtype=np.int32)
        elif len(spans) < len(tokens):
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

    @property
    def next_positions(self) -> Int32:
        """Where the tokens behind the output rows will stand: int32 [m]."""
        return self.positions[self.output_rows] + np.int32(1)


def _mask(value: bool | Sequence[bool] | NDArray[np.bool_], rows: int) -> NDArray[np.bool_]:
    return np.full(rows, value, np.bool_) if isinstance(value, bool) else np.asarray(value, np.bool_)


@dataclass(frozen=True)
class Candidates:
    """The largest logits of some rows, descending. Among equals the lower id comes first; NaN precedes all numbers."""

    #: int32 [t, min(MAX_CANDIDATES, vocab)]
    ids: Int32
    #: float32 of the same shape
    logits: NDArray[np.float32]
    #: float32 [t], if asked for: the log of the sum of exp over the row's whole vocabulary
    norms: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Output:
    """The last shard's result of a step, in fresh arrays."""

    #: int32 [m]: argmax of each output row's logits under its mask, the lowest id on ties, or the token that was drawn;
    #: -1 where the largest logit of a drawn row is not finite
    ids: Int32
    #: float32 [k, vocab] of the rows that need their logits
    logits: NDArray[np.float32]
    #: of the rows that need candidates; None if no row does
    candidates: Candidates | None = None

    @cached_property
    def tokens(self) -> list[int]:
        """`ids` as Python's numbers: sequences take their parts of a list faster than those of an array."""
        tokens: list[int] = self.ids.tolist()
        return tokens

    @classmethod
    def joined(cls, outputs: Sequence[Output]) -> Output:
        """The output of a step from the outputs of its microbatches, at least one."""
        ids, logits = (np.concatenate([getattr(output, part) for output in outputs]) for part in ("ids", "logits"))
        tops = [output.candidates for output in outputs if output.candidates is not None]
        if not tops:
            return cls(ids, logits)
        return cls(ids, logits, Candidates(*(np.concatenate([getattr(t, p) for t in tops]) for p in ("ids", "logits"))))


@dataclass(frozen=True)
class StepShape:
    """Everything that the launches of a step may depend on besides the contents of device memory."""

    #: number of rows
    rows: int
    #: number of spans
    spans: int
    #: rows of the longest span; rounded up to a power of two if a span is speculative
    longest: int
    #: number of output rows
    output_rows: int
    #: width of each view's table
    widths: tuple[int, ...]
    #: whether each view says which rows of a span are seen
    seen: tuple[bool, ...]
    #: whether a span is speculative or accepts rows
    pending: bool = False
    #: whether a span is a branch or accepts a path of a draft tree
    branching: bool = False
    #: number of each view's copies
    copies: tuple[int, ...] = ()
    #: whether rotary embeddings take other positions
    position_ids: bool = False
    #: rows of the shortest span, if the longest has more than MAX_TREE_ROWS; else 0
    shortest: int = 0
    #: every row's position is below so many pages: 8, 16 or 32; 0: it may be any
    pages: int = 0

    @classmethod
    def of(cls, step: Step, widths: tuple[int, ...] | None = None) -> StepShape:
        """The shape of a step. `widths`: of its tables, if they are wider than the step's."""
        longest = max((span.rows for span in step.spans), default=0)
        shortest = min(span.rows for span in step.spans) if longest > MAX_TREE_ROWS else 0
        if widths is None:
            widths = tuple(view.table.shape[1] for view in step.views)
        seen = tuple(view.seen is not None for view in step.views)
        pending = any(span.speculative or span.accepted for span in step.spans)
        branching = any(span.path or span.ancestors for span in step.spans)
        if any(span.speculative for span in step.spans):
            # Rounded up, so that chains and trees of all forms have few shapes.
            longest = 1 << (longest - 1).bit_length()
        copies = tuple(0 if view.copies is None else len(view.copies) for view in step.views)
        end = max((span.position + span.rows for span in step.spans), default=0)
        pages = next((pages for pages in _PAGES if end <= pages * PAGE), 0)
        sizes = step.rows, len(step.spans), longest, len(step.output_rows)
        own = copies, step.position_ids is not None, shortest, pages
        return cls(*sizes, widths, seen, pending, branching, *own)

    @cached_property
    def size(self) -> int:
        """Number of int32 values of all arrays together."""
        return sum(_padded(math.prod(shape)) for shape in self._shapes)

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        rows, spans = (self.rows,), (self.spans,)
        shapes = [rows, rows, (self.output_rows,), (*spans, 4), (*spans, 2), rows]
        shapes += [(*spans, 2, 1 + MAX_TREE_ROWS)] if self.branching else []
        shapes += [rows] if self.position_ids else []
        for width, seen, copies in itertools.zip_longest(self.widths, self.seen, self.copies, fillvalue=0):
            shapes += [(*spans, width), (*spans, width), spans, rows, *([(*rows, 2)] if seen else [])]
            shapes += [(copies, 2)] if copies else []
        return tuple(shapes)

    def cut(self, memory: Array) -> list[Array]:
        """Slice int32 [size] on any device into the arrays of a step, in the order of DeviceStep."""
        arrays, at = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            arrays.append(memory[at : at + size].reshape(shape))
            at += _padded(size)
        return arrays


def _padded(size: int) -> int:
    # Each array begins at a multiple of 256 bytes, as if it had been allocated by itself.
    return -(-size // 64) * 64


@dataclass(frozen=True)
class SpanArrays:
    """A step's spans on a device."""

    #: int32 [spans, 4] with columns slot, start, rows, position
    table: Array
    #: int32 [rows]: the span of each row
    row_span: Array
    #: number of spans
    count: int
    #: rows of the longest span
    longest: int
    #: int32 [spans, 2] with columns accepted, speculative; None if all are zeros
    pending: Array | None = None
    #: int32 [spans, 2, 1 + MAX_TREE_ROWS]: how many rows, and then the rows, first of the accepted ones (also where
    #: Span.path is empty), then of the ancestors; None without draft trees
    branches: Array | None = None
    #: the shortest span has at least so many rows
    shortest: int = 0
    #: every row's position is below so many pages; 0: it may be any
    pages: int = 0


class DeviceStep:
    """A step's arrays on one device, with the shape that launches need on the host.

    tokens, positions, position_ids: int32 [rows]; output_rows: int32 [m].
    """

    def __init__(self, device: Device, shape: StepShape, memory: Array) -> None:
        """The arrays of a step of `shape` lie in `memory`, int32 [shape.size] on the device; it may be filled later."""
        self.device = device
        self.shape = shape
        self.tokens, self.positions, self.output_rows, table, pending, row_span, *rest = shape.cut(memory)
        arrays = iter(rest)
        branches = next(arrays) if shape.branching else None
        #: positions for rotary embeddings
        self.position_ids = next(arrays) if shape.position_ids else self.positions
        accepting = pending if shape.pending else None
        longest, shortest = shape.longest, shape.shortest
        self.spans = SpanArrays(table, row_span, shape.spans, longest, accepting, branches, shortest, shape.pages)
        views = []
        for seen, copies in itertools.zip_longest(shape.seen, shape.copies, fillvalue=0):
            table, first, count, dest = itertools.islice(arrays, 4)
            bits, pairs = next(arrays) if seen else None, next(arrays) if copies else None
            views.append(PageView(table, first, count, dest, bits, pairs))
        self.views = tuple(views)
        #: rotary tables that layers share
        self.ropes: dict[object, Array] = {}
        #: float32 [rows, 2 kv_heads head_dim] by layer: the rows' keys and then their values, for layers on other
        #: devices that use them as their own
        self.lent: dict[int, Array] = {}
        #: computes full attention instead of luce.ops.attention: a luce.ops.block_sparse.SparseStep
        self.sparse: Callable[[Any], Array] | None = None

    @classmethod
    def upload(cls, device: Device, step: Step) -> DeviceStep:
        """Upload a step to new memory of the device."""
        shape = StepShape.of(step)
        memory = np.empty(shape.size, np.int32)
        write_step(step, shape.cut(memory))
        uploaded = cls(device, shape, device.upload(memory))
        write_future_tokens(device, step, uploaded.tokens)
        return uploaded

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape.rows


def write_future_tokens(device: Device, step: Step, tokens: Array) -> None:
    """Queue the copy of the tokens of a step that a device still chooses to `tokens`, int32 [rows] on the device. The
    host does not wait for them."""
    if step.future_tokens is not None:
        device.wait_for(step.future_tokens.ready)
        device.write(tokens, step.future_tokens.values)


def write_step(step: Step, arrays: Sequence[Int32]) -> None:
    """Write a step to arrays in host memory that StepShape.cut returned. Their tables may be wider than the step's."""
    table: Int32 = np.array([(s.slot, s.start, s.rows, s.position) for s in step.spans], np.int32).reshape(-1, 4)
    pending: Int32 = np.array([(s.accepted, s.speculative) for s in step.spans], np.int32).reshape(-1, 2)
    row_span = np.repeat(np.arange(len(table), dtype=np.int32), table[:, 2])
    values = [step.tokens, step.positions, step.output_rows, table, pending, row_span]
    if any(span.path or span.ancestors for span in step.spans):
        values.append(branches_of(step.spans))
    if step.position_ids is not None:
        values.append(step.position_ids)
    for view in step.views:
        values += [view.table, view.first, view.count, view.dest, *([] if view.seen is None else [view.seen])]
        values += [] if view.copies is None or not len(view.copies) else [view.copies]
    for array, value in zip(arrays, values, strict=True):
        array[..., : value.shape[-1]] = value


def branches_of(spans: Sequence[Span]) -> Int32:
    """SpanArrays.branches of a step's spans."""
    branches = np.zeros((len(spans), 2, 1 + MAX_TREE_ROWS), np.int32)
    for own, span in zip(branches, spans, strict=True):
        for to, rows in zip(own, (span.path or range(span.accepted), span.ancestors), strict=True):
            to[: 1 + len(rows)] = [len(rows), *rows]
    return branches
