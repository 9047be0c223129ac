"""Steps on a backend, timed from the host: prompts, decoding, verification, many sequences.

Where the backend bounds the pages of a sequence, they come and go as in the engine (luce.kvcache.paging).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from luce.backend.backend import Backend
from luce.bench.cost import Rows
from luce.engine.sequence import PagingLimits, rows_to_boundary
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import QUESTION_ROWS, KVFlash, Pager
from luce.kvcache.prefix_tree import HostPage, Residency
from luce.runtime.step import Int32, Span, Step

Kind = Literal["prompt", "decode", "verify", "batch"]
# Steps of a verification test: enough to time with the host's clock.
_VERIFIED = 16


@dataclass(frozen=True)
class Workload:
    """`size` prompt tokens, generated tokens, verified rows or sequences, each sequence at position `depth`.

    `steps`: tokens that a batch's sequences generate.
    """

    kind: Kind
    size: int
    depth: int
    steps: int = 1

    @property
    def name(self) -> str:
        """As the table calls it."""
        label = {"prompt": "prompt {}", "decode": "decode {}", "verify": "verify {} rows", "batch": "{} sequences"}
        return label[self.kind].format(self.size) + (f" at {self.depth}" if self.depth else "")

    @property
    def context(self) -> int:
        """Positions that a sequence needs."""
        return self.depth + (self.size if self.kind != "batch" else self.steps)

    def plan(self, chunk: int) -> list[tuple[list[Rows], int]]:
        """Spans and wanted rows of each step."""
        at = self.depth
        if self.kind == "prompt":
            starts = range(0, self.size, chunk)
            return [([Rows(min(chunk, self.size - s), at + s)], int(s + chunk >= self.size)) for s in starts]
        if self.kind == "verify":
            return [([Rows(self.size, at)], self.size)] * _VERIFIED
        if self.kind == "decode":
            return [([Rows(1, at + n)], 1) for n in range(self.size)]
        return [([Rows(1, at + n)] * self.size, self.size) for n in range(self.steps)]

    @property
    def tokens(self) -> int:
        """Rows that a run computes."""
        return self.size * {"verify": _VERIFIED, "batch": self.steps}.get(self.kind, 1)


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Wall time of a number of calls."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Traffic:
    """What went between devices and host memory, and why.

    pages_out, pages_in: that left and came back; bytes: copied for that, of pages that left once; looks: times that the
    policy was asked, and the seconds that this took, with the pages that moved then.
    """

    pages_out: int = 0
    pages_in: int = 0
    bytes: int = 0
    looks: int = 0
    look_seconds: float = 0

    def since(self, before: Traffic) -> Traffic:
        """What has come since."""
        own, theirs = dataclasses.astuple(self), dataclasses.astuple(before)
        return Traffic(*(now - then for now, then in zip(own, theirs, strict=True)))


@dataclass(frozen=True)
class Run:
    """What a piece of work took."""

    seconds: float
    traffic: Traffic


@dataclass(frozen=True)
class _Filled:
    """A sequence of `length` positions that does not fit, and where its other pages are."""

    length: int
    residency: Residency
    away: dict[int, HostPage]


class Stepper:
    """Sequences with random prompts on a backend, continued greedily. Slot s is sequence s.

    `kvflash`: which pages stay on the devices, needed where the backend bounds the pages of a sequence.
    """

    def __init__(self, backend: Backend, chunk: int, kvflash: KVFlash | None = None) -> None:
        self._backend = backend
        self._chunk = chunk
        self._pages = PageTables.over(backend, chunk)
        self._pager = None if kvflash is None else Pager.over(backend, self._pages, kvflash, chunk)
        self._random = np.random.default_rng(0)
        self._texts = np.zeros((backend.capacity.slots, backend.capacity.context + 1), np.int32)
        self._position = [0] * backend.capacity.slots
        self._filled: dict[int, _Filled] = {}

    def look(self, slot: int) -> tuple[float, int] | None:
        """Seconds of a look at the pages of a sequence, and tokens from one to the next; None if it fits."""
        position = self._position[slot]
        if self._pager is None or self._pager.residency(slot, position) is None:
            return None
        pager, text = self._pager, self._texts[slot, : position + 1]
        return seconds(lambda: pager.rescore(slot, position, text)), pager.rescore_interval(position)

    def read(self, slot: int, rows: int) -> None:
        """Read `rows` prompt tokens, in chunks, and wait for the token that follows them."""
        begin = self._position[slot]
        end = begin + rows
        self._texts[slot, begin:end] = self._random.integers(0, self._backend.capacity.vocab, rows, np.int32)
        prompt, limits, at = self._texts[slot, :end], PagingLimits(), begin
        if self._pager is not None and end > self._pager.max_positions:
            limits = PagingLimits(prompt_multiple=self._pager.segment, query_rows=QUESTION_ROWS)
            self._pager.begin_prompt(slot, prompt, begin)
        while at < end:
            self._page(slot, end)
            count = min(rows_to_boundary(at, end, limits), self._chunk)
            self._forward([slot], prompt[at : at + count], count, wanted=int(at + count == end))
            at += count

    def verify(self, slot: int, rows: int) -> None:
        """Rows of one sequence whose next tokens are all wanted; the sequence does not advance."""
        tokens = self._random.integers(0, self._backend.capacity.vocab, rows, np.int32)
        self._forward([slot], tokens, rows, wanted=rows)
        self._position[slot] -= rows

    def decode(self, slots: Sequence[int]) -> None:
        """One greedy token more for each sequence."""
        for slot in slots:
            self._page(slot, self._position[slot] + 1)
        self._forward(slots, np.array([self.newest(slot) for slot in slots], np.int32), 1, wanted=1)

    def newest(self, slot: int) -> int:
        """The token that follows a sequence's rows."""
        return int(self._texts[slot, self._position[slot]])

    def place(self, slot: int, position: int) -> None:
        """Let a sequence stand at a position. Its pages hold what they held: time does not depend on it.

        A sequence that does not fit must have been filled up to there.
        """
        self._release(slot)
        filled = self._filled.get(slot)
        if filled is None or filled.length != position:
            for at in range(0, position, self._chunk):
                self._pages.extend(slot, at, min(self._chunk, position - at))
        else:
            assert self._pager is not None
            away = self._pager.swapped_out(position, filled.residency)
            for group in self._pages.groups:
                group.resume(slot, position, (), () if group.max_resident is None else away)
            self._pager.resume(slot, filled.away, filled.residency)
        self._position[slot] = position

    def fill(self, slots: Sequence[int], depth: int) -> Run:
        """Let sequences read `depth` tokens, so that what `place` finds in their pages are numbers like any others."""
        for slot in slots:
            self._filled.pop(slot, None)
            self.place(slot, 0)

        def read() -> None:
            for slot in slots:
                self.read(slot, depth)

        run = self._timed(read)
        for slot in slots:
            if self._pager is not None and (residency := self._pager.residency(slot, depth)) is not None:
                entries = self._pager.swapped_out(depth, residency)
                pages = {entry: self._pager.host_page(slot, entry) for entry in entries}
                known = {entry: page for entry, page in pages.items() if page is not None}
                self._filled[slot] = _Filled(depth, residency, known)
        return run

    def _timed(self, work: Callable[[], object], times: int = 1) -> Run:
        before = self._traffic()
        return Run(seconds(work, times), self._traffic().since(before))

    def _traffic(self) -> Traffic:
        if self._pager is None:
            return Traffic()
        stats = self._pager.stats()
        return Traffic(stats.swapped_out, stats.swapped_in, stats.moved_bytes, stats.rescores, stats.rescore_seconds)

    def _release(self, slot: int) -> None:
        if self._pager is not None:
            self._pager.release(slot)
        self._pages.release(slot)
        self._pages.reserve(slot, self._backend.capacity.context)

    def _page(self, slot: int, end: int) -> None:
        """Let the pages that matter be there, of a sequence of which the tokens before `end` are known."""
        position = self._position[slot]
        if self._pager is not None and self._pager.rescore_due(slot, position):
            self._pager.rescore(slot, position, self._texts[slot, :end])

    def _forward(self, slots: Sequence[int], tokens: Int32, rows: int, wanted: int) -> None:
        """`rows` rows of each sequence in one step; the next tokens of the last `wanted` of them are waited for."""
        starts = [self._position[slot] for slot in slots]
        for slot, position in zip(slots, starts, strict=True):
            self._pages.extend(slot, position, rows)
        own = np.arange(len(slots) * rows, dtype=np.int32)
        spans = [Span(slot, i * rows, rows, start) for i, (slot, start) in enumerate(zip(slots, starts, strict=True))]
        step = Step.of_spans(spans, tokens, self._pages.views, own[own % rows >= rows - wanted])
        output = self._backend.forward(step)
        for index, slot in enumerate(slots):
            self._position[slot] += rows
            if wanted:
                self._texts[slot, self._position[slot]] = output.ids[(index + 1) * wanted - 1]

    def run(self, test: Workload) -> Run:
        """One run of a test."""
        slots = range(test.size if test.kind == "batch" else 1)
        for slot in slots:
            self.place(slot, test.depth)
        if test.kind == "prompt":
            return self._timed(lambda: self.read(0, test.size))
        if test.kind == "verify":
            return self._timed(lambda: self.verify(0, test.size), _VERIFIED)
        return self._timed(lambda: self.decode(slots), test.steps if test.kind == "batch" else test.size)
