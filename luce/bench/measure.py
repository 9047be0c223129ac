"""Steps on a backend, timed from the host: prompts, decoding, verification, many sequences.

If the backend limits the resident pages of a sequence, pages are swapped out and in as in the engine
(luce.kvcache.paging).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from luce.backend.backend import Backend
from luce.bench.cost import Rows
from luce.engine.sequence import PagingLimits, rows_to_boundary
from luce.engine.sequence_paging import prompt_limits
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import KVFlash, Pager
from luce.kvcache.prefix_tree import HostPage, Residency
from luce.runtime.step import Int32, Output, Span, Step

Kind = Literal["prompt", "decode", "verify", "batch"]
# Steps of a verification test: enough for the host's clock.
_VERIFICATIONS = 16


@dataclass(frozen=True)
class Workload:
    """The work of one test."""

    kind: Kind
    #: prompt tokens, generated tokens, verified rows or sequences, by kind
    size: int
    #: position at which each sequence begins
    depth: int
    #: tokens that each sequence of a batch generates
    steps: int = 1

    @property
    def name(self) -> str:
        """The name in the table."""
        label = {"prompt": "prompt {}", "decode": "decode {}", "verify": "verify {} rows", "batch": "{} sequences"}
        return label[self.kind].format(self.size) + (f" at {self.depth}" if self.depth else "")

    @property
    def context(self) -> int:
        """Positions that one sequence needs."""
        return self.depth + (self.size if self.kind != "batch" else self.steps)

    def plan(self, chunk: int) -> list[tuple[list[Rows], int]]:
        """The spans of each step, and the number of its rows whose logits are wanted."""
        at = self.depth
        if self.kind == "prompt":
            starts = range(0, self.size, chunk)
            return [([Rows(min(chunk, self.size - s), at + s)], int(s + chunk >= self.size)) for s in starts]
        if self.kind == "verify":
            return [([Rows(self.size, at)], self.size)] * _VERIFICATIONS
        if self.kind == "decode":
            return [([Rows(1, at + n)], 1) for n in range(self.size)]
        return [([Rows(1, at + n)] * self.size, self.size) for n in range(self.steps)]

    @property
    def tokens(self) -> int:
        """Rows that a run computes."""
        return self.size * {"verify": _VERIFICATIONS, "batch": self.steps}.get(self.kind, 1)


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Seconds that `times` calls take on the host's clock."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Traffic:
    """Pages that were swapped between devices and host memory."""

    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    #: bytes copied in both directions; a page is copied to host memory once, however often it is swapped out
    swapped_bytes: int = 0
    #: rounds of scoring
    rescores: int = 0
    #: seconds of the scoring, with the pages swapped for it
    rescore_seconds: float = 0

    def since(self, before: Traffic) -> Traffic:
        """The difference to earlier counts."""
        own, earlier = dataclasses.astuple(self), dataclasses.astuple(before)
        return Traffic(*(now - then for now, then in zip(own, earlier, strict=True)))


@dataclass(frozen=True)
class Run:
    """The cost of a piece of work, as measured."""

    seconds: float
    traffic: Traffic


@dataclass(frozen=True)
class _Prefilled:
    """A sequence that has more pages than may be resident."""

    length: int
    residency: Residency
    #: pages in host memory, by entry
    host_pages: dict[int, HostPage]


class Stepper:
    """Continues sequences with random prompts greedily on a backend. Slot s holds sequence s.

    `kvflash`: the options of paging; needed if the backend limits the resident pages of a sequence.
    """

    def __init__(self, backend: Backend, chunk: int, kvflash: KVFlash | None = None) -> None:
        self._backend = backend
        self._chunk = chunk
        self._pages = PageTables.over(backend, chunk)
        #: None if all pages of a sequence are resident
        self.pager = None if kvflash is None else Pager.over(backend, self._pages, kvflash, chunk)
        self._random = np.random.default_rng(0)
        self._texts = np.zeros((backend.capacity.slots, backend.capacity.context + 1), np.int32)
        self._position = [0] * backend.capacity.slots
        self._prefilled: dict[int, _Prefilled] = {}

    def time_rescore(self, slot: int) -> tuple[float, int] | None:
        """Seconds of one round of scoring of a sequence's pages, and the tokens between two rounds; None if all of its
        pages are resident."""
        position = self._position[slot]
        if self.pager is None or self.pager.residency(slot, position) is None:
            return None
        pager, text = self.pager, self._texts[slot, : position + 1]
        return seconds(lambda: pager.rescore(slot, position, text)), pager.rescore_interval(position)

    def read(self, slot: int, rows: int) -> None:
        """Read `rows` prompt tokens in chunks, and wait for the next token."""
        begin = self._position[slot]
        end = begin + rows
        self._texts[slot, begin:end] = self._random.integers(0, self._backend.capacity.vocab, rows, np.int32)
        prompt, limits, at = self._texts[slot, :end], PagingLimits(), begin
        if self.pager is not None and end > self.pager.max_positions:
            limits = prompt_limits(self.pager)
            self.pager.begin_prompt(slot, prompt, begin)
        while at < end:
            self._rescore_if_due(slot, end)
            count = min(rows_to_boundary(at, end, limits), self._chunk)
            self._forward([slot], prompt[at : at + count], count, wanted=int(at + count == end))
            at += count

    def verify(self, slot: int, rows: int) -> None:
        """Compute `rows` rows of one sequence with the logits of each; the sequence does not advance."""
        tokens = self._random.integers(0, self._backend.capacity.vocab, rows, np.int32)
        self._forward([slot], tokens, rows, wanted=rows)
        self._position[slot] -= rows

    def decode(self, slots: Sequence[int], count: int = 1) -> None:
        """Generate `count` greedy tokens for each sequence, and wait for each of them. As the engine does, steps are
        queued one ahead where the backend can and no page is swapped."""
        ahead: list[Step] = []

        def queue(left: int) -> None:
            if left and self.pager is None and self._backend.asynchronous:
                step = self._step(slots, np.zeros(len(slots), np.int32), 1, wanted=1, behind=1)
                if self._backend.follow(step):
                    ahead.append(step)

        for left in reversed(range(count)):
            for slot in slots:
                self._rescore_if_due(slot, self._position[slot] + 1)
            tokens = np.array([self.newest(slot) for slot in slots], np.int32)
            step = ahead.pop() if ahead else self._step(slots, tokens, 1, wanted=1)
            self._take(slots, 1, 1, self._backend.forward(step, partial(queue, left)))

    def newest(self, slot: int) -> int:
        """The newest token of a sequence, whose row is not computed yet."""
        return int(self._texts[slot, self._position[slot]])

    def move_to(self, slot: int, position: int) -> None:
        """Set the length of a sequence. Its pages keep their content: the time of a step does not depend on it.

        A sequence with more pages than may be resident must have been prefilled to this position.
        """
        self._release(slot)
        prefilled = self._prefilled.get(slot)
        if prefilled is None or prefilled.length != position:
            for at in range(0, position, self._chunk):
                self._pages.extend(slot, at, min(self._chunk, position - at))
        else:
            assert self.pager is not None
            swapped_out = self.pager.swapped_out(position, prefilled.residency)
            for group in self._pages.groups:
                group.resume(slot, position, (), () if group.max_resident is None else swapped_out)
            self.pager.resume(slot, prefilled.host_pages, prefilled.residency)
        self._position[slot] = position

    def prefill(self, slots: Sequence[int], depth: int) -> Run:
        """Let sequences read `depth` tokens, so that their pages hold ordinary numbers when tests begin there."""
        for slot in slots:
            self._prefilled.pop(slot, None)
            self.move_to(slot, 0)

        def read() -> None:
            for slot in slots:
                self.read(slot, depth)

        run = self._timed(read)
        for slot in slots:
            if self.pager is not None and (residency := self.pager.residency(slot, depth)) is not None:
                entries = self.pager.swapped_out(depth, residency)
                pages = {entry: self.pager.host_page(slot, entry) for entry in entries}
                known = {entry: page for entry, page in pages.items() if page is not None}
                self._prefilled[slot] = _Prefilled(depth, residency, known)
        return run

    def _timed(self, work: Callable[[], object], times: int = 1) -> Run:
        before = self._traffic()
        return Run(seconds(work, times), self._traffic().since(before))

    def _traffic(self) -> Traffic:
        if self.pager is None:
            return Traffic()
        stats = self.pager.stats()
        return Traffic(stats.swapped_out, stats.swapped_in, stats.moved_bytes, stats.rescores, stats.rescore_seconds)

    def _release(self, slot: int) -> None:
        if self.pager is not None:
            self.pager.release(slot)
        self._pages.release(slot)
        self._pages.reserve(slot, self._backend.capacity.context)

    def _rescore_if_due(self, slot: int, end: int) -> None:
        """Score the pages of a sequence again if that is due. Its tokens before `end` are known."""
        position = self._position[slot]
        if self.pager is not None and self.pager.rescore_due(slot, position):
            self.pager.rescore(slot, position, self._texts[slot, :end])

    def _forward(self, slots: Sequence[int], tokens: Int32, rows: int, wanted: int) -> None:
        """Compute `rows` rows of each sequence in one step, and wait for the next tokens of the last `wanted` of
        them."""
        self._take(slots, rows, wanted, self._backend.forward(self._step(slots, tokens, rows, wanted)))

    def _step(self, slots: Sequence[int], tokens: Int32, rows: int, wanted: int, behind: int = 0) -> Step:
        """A step of `rows` rows of each sequence, `behind` positions behind the next one."""
        starts = [self._position[slot] + behind for slot in slots]
        for slot, position in zip(slots, starts, strict=True):
            self._pages.extend(slot, position, rows)
        own = np.arange(len(slots) * rows, dtype=np.int32)
        spans = [Span(slot, i * rows, rows, start) for i, (slot, start) in enumerate(zip(slots, starts, strict=True))]
        return Step.of_spans(spans, tokens, self._pages.views, own[own % rows >= rows - wanted])

    def _take(self, slots: Sequence[int], rows: int, wanted: int, output: Output) -> None:
        """Take the output of a step."""
        for index, slot in enumerate(slots):
            self._position[slot] += rows
            if wanted:
                self._texts[slot, self._position[slot]] = output.ids[(index + 1) * wanted - 1]

    def run(self, test: Workload) -> Run:
        """Run a test once."""
        slots = range(test.size if test.kind == "batch" else 1)
        for slot in slots:
            self.move_to(slot, test.depth)
        if test.kind == "prompt":
            return self._timed(lambda: self.read(0, test.size))
        if test.kind == "verify":
            return self._timed(lambda: self.verify(0, test.size), _VERIFICATIONS)
        count = test.steps if test.kind == "batch" else test.size
        return self._timed(lambda: self.decode(slots, count))
