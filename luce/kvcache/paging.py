"""KVFlash: which pages of a long sequence are resident, that is, on the devices.

A sequence has a limited number of resident pages of full attention (luce.kvcache.page_table). Pages that are swapped
out are copied to host memory unchanged, once, as a full page is not written again; pages that are swapped in go to any
free page. The first page, the last ones and those that a step writes always stay resident, and of the others those with
the highest scores. Pages are scored again after a number of tokens; then pages that have become important replace
others.

The pages that a row sees do not depend on the rows that are computed with it: the pages that a segment of the prompt
needs are freed before its first row, and draft rows neither begin a page nor pass the length at which pages are scored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from luce.backend.backend import Backend
from luce.backend.kvflash_size import SINK
from luce.errors import LuceError
from luce.kvcache.page_table import PageTables
from luce.kvcache.policies import Policy, Scores
from luce.kvcache.prefix_tree import HostPage, Residency
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import SavedState

_log = logging.getLogger(__name__)

#: A long sequence is scored once in length / _HISTORY tokens at most: scoring then takes about the same share of the
#: time at any length.
_HISTORY = 45
#: The last rows of a prompt that does not fit. A step of their own reads them, after pages have been scored once more:
#: the question decides which pages it sees.
QUESTION_ROWS = 1
#: pages in one copy between host and devices: bounds the memory that the pages take twice meanwhile
_BATCH = 16


@dataclass(frozen=True)
class PagingStats:
    """Numbers at one moment, with counters since the start. Pages have PAGE tokens."""

    #: the policy in force
    policy: str
    #: resident pages that one sequence may have
    max_resident_pages: int
    #: tokens between two rounds of scoring a sequence's pages
    tau: int
    #: pages of sequences that lie on the devices
    resident_pages: int = 0
    #: pages of running sequences that lie in host memory
    host_pages: int = 0
    #: host memory of these pages and of the policy's own data, and its limit
    host_bytes: int = 0
    host_budget: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    #: pages copied to host memory: each page once at most, however often it is swapped out
    copied_pages: int = 0
    #: bytes copied in both directions
    moved_bytes: int = 0
    #: pages given up because host memory was full
    lost_pages: int = 0
    #: rounds of scoring
    rescores: int = 0
    #: pages that a round of scoring asked for and that were resident already
    resident_hits: int = 0
    #: time of the engine's thread for the policy and for swapping pages
    rescore_seconds: float = 0.0


@dataclass(frozen=True)
class KVFlash:
    """Options of a Pager."""

    #: the pager closes it
    policy: Policy
    #: pages before the one being written that stay resident
    tail: int
    #: tokens between two rounds of scoring
    tau: int
    #: bytes of host memory for pages
    budget: int


@dataclass
class _PagedSequence:
    """A sequence whose pages do not all fit on the devices."""

    #: by entry, pages that are in host memory
    host: dict[int, HostPage] = field(default_factory=dict)
    #: those of `host` whose copies may be in progress
    copying: set[SavedState] = field(default_factory=set)
    #: by entry, the clock when the page was swapped in; pages that never were go by position
    swapped_in_at: dict[int, int] = field(default_factory=dict)
    scores: Scores | None = None
    #: length of the sequence when its pages were scored
    scored_at: int = 0
    #: tokens of the prompt
    prompt: int = 0
    #: tokens of the prompt that came from the prefix cache
    cached: int = 0
    #: whether a page was given up because host memory was full
    incomplete: bool = False


class Pager:
    """Swaps pages of full attention in and out. All methods but `stats` run on the engine's thread.

    `chunk`: prompt rows in a step. Raises what the backend raises; the sequence is lost then.
    """

    def __init__(self, backend: Backend, tables: PageTables, options: KVFlash, chunk: int) -> None:
        table = tables.full
        assert table is not None and table.max_resident is not None
        self._backend = backend
        self._tables = tables
        self._table = table
        self._max_resident = table.max_resident
        self._options = options
        self._policy = options.policy
        self._tail = options.tail
        #: rows of a prompt that does not fit, a multiple of PAGE: pages are swapped out where such a segment begins, in
        #: the one with the first page that does not fit where that page begins. It takes half of the resident pages
        #: beside the first and the last ones; the pages with high scores get the rest.
        self.segment = max(1, min((self._max_resident - SINK - self._tail) // 2, chunk // PAGE)) * PAGE
        self._clock = 0
        self._sequences: dict[int, _PagedSequence] = {}
        #: saved pages in host memory, and how many of their pages are in use
        self._saved: dict[SavedState, int] = {}
        self._page_bytes = backend.capacity.page_bytes
        #: bytes of `_saved`
        self._bytes = 0
        self._swapped_out = self._swapped_in = self._copied = self._lost = self._rescores = self._hits = 0
        self._seconds = 0.0
        #: whether the last round of scoring failed
        self._failing = False
        table.swap_out_for = self._swap_out_for

    @classmethod
    def over(cls, backend: Backend, tables: PageTables, options: KVFlash, chunk: int) -> Pager | None:
        """A pager, if the resident pages of sequences are limited."""
        limited = tables.full is not None and tables.full.max_resident is not None
        return cls(backend, tables, options, chunk) if limited else None

    @property
    def max_positions(self) -> int:
        """Most positions of a sequence that are resident."""
        return self._max_resident * PAGE

    # --- for the engine

    def begin_prompt(self, slot: int, prompt: Int32, cached: int) -> None:
        """The prompt in a slot, which does not fit, is about to be read. `cached`: positions that are in the cache."""
        sequence = self._sequence(slot)
        sequence.prompt, sequence.cached = len(prompt), cached
        self.rescore(slot, cached, prompt)

    def rescore_interval(self, length: int) -> int:
        """Tokens between two rounds of scoring for a sequence of `length` positions."""
        return max(self._options.tau, length // _HISTORY)

    def max_draft_rows(self, slot: int, length: int) -> int | None:
        """Most draft rows behind the row at position `length`, None for no limit."""
        in_page = PAGE - 1 - length % PAGE
        sequence = self._sequences.get(slot)
        if sequence is None:
            entry = length // PAGE
            if entry + 1 < self._max_resident:
                return None
            # The first row of the first page that does not fit has no draft rows: pages are scored behind it.
            return in_page if entry < self._max_resident else 0
        return max(0, min(in_page, sequence.scored_at + self.rescore_interval(length) - length - 1))

    def rescore_due(self, slot: int, length: int) -> bool:
        """Whether the pages of a sequence of `length` positions are to be scored again."""
        sequence = self._sequences.get(slot)
        if sequence is None:
            return False
        if length < sequence.prompt:
            return length == sequence.prompt - QUESTION_ROWS and length != sequence.scored_at
        return length >= sequence.scored_at + self.rescore_interval(length)

    def rescore(self, slot: int, length: int, tokens: Int32) -> None:
        """Score the pages of a sequence of `length` positions, and make those with the highest scores resident."""
        started = time.monotonic()
        try:
            self._rescore(slot, length, tokens)
        finally:
            self._seconds += time.monotonic() - started

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            for entry in list(sequence.host):
                self._forget(sequence, entry)
        self._policy.forget(slot)

    def close(self) -> None:
        """Idempotent."""
        self._policy.close()

    def stats(self) -> PagingStats:
        """Numbers for /props and the metrics. Thread-safe."""
        table = self._table
        return PagingStats(
            policy=self._policy.name,
            max_resident_pages=self._max_resident,
            tau=self._options.tau,
            resident_pages=table.total - table.free - table.cached_only,
            host_pages=sum(len(sequence.host) for sequence in tuple(self._sequences.values())),
            host_bytes=self._host_bytes,
            host_budget=self._options.budget,
            swapped_out=self._swapped_out,
            swapped_in=self._swapped_in,
            copied_pages=self._copied,
            moved_bytes=(self._copied + self._swapped_in) * self._page_bytes,
            lost_pages=self._lost,
            rescores=self._rescores,
            resident_hits=self._hits,
            rescore_seconds=self._seconds,
        )

    # --- for the prefix cache

    def host_page(self, slot: int, entry: int) -> HostPage | None:
        """Where a page lies in host memory, if it does."""
        sequence = self._sequences.get(slot)
        return None if sequence is None else sequence.host.get(entry)

    def complete(self, slot: int) -> bool:
        """Whether every page of a sequence exists."""
        sequence = self._sequences.get(slot)
        return sequence is None or not sequence.incomplete

    def residency(self, slot: int, length: int) -> Residency | None:
        """What `resume` needs to continue at `length` positions; None if all pages are resident."""
        sequence = self._sequences.get(slot)
        if sequence is None:
            return None
        resident = frozenset(entry for entry in self._table.resident(slot) if entry * PAGE < length)
        return Residency(resident, dict(sequence.swapped_in_at), sequence.scores, sequence.scored_at)

    def swapped_out(self, length: int, residency: Residency | None) -> range | list[int]:
        """The entries that are swapped out when a sequence of `length` positions resumes."""
        whole, end = length // PAGE, -(-length // PAGE)
        if residency is not None:
            return [entry for entry in range(whole) if entry not in residency.resident]
        if end <= self._max_resident:
            return range(0)
        return range(SINK, max(SINK, end - (self._max_resident - SINK - 1)))

    def resume(self, slot: int, host: dict[int, HostPage], residency: Residency | None) -> None:
        """A slot has resumed a sequence whose other pages, by entry, are in host memory."""
        if not host and residency is None:
            return
        self.release(slot)
        sequence = self._sequence(slot)
        if residency is not None:
            sequence.swapped_in_at, sequence.scores = dict(residency.swapped_in_at), residency.scores
            sequence.scored_at = residency.scored_at
            self._clock = max([self._clock, *sequence.swapped_in_at.values()])
        for entry, page in host.items():
            self._remember(sequence, entry, page)
        if self._policy.needs_pages:
            for batch in _batches(list(host)):
                self._show(slot, sequence, batch)
        self._enforce_budget()

    # --- resident pages

    def _swap_out_for(self, slot: int, position: int, rows: int) -> None:
        """Swap out as many pages as rows [position, position + rows) need, or the prompt segment that they begin."""
        held_end = self._table.end(slot)
        end = -(-(position + rows) // PAGE)
        if end <= held_end:
            return
        sequence = self._sequences.get(slot)
        if sequence is not None and position < sequence.prompt:
            segment_end = (position // self.segment + 1) * self.segment
            if position < self.max_positions:
                # What fits sees all of its text, as in a sequence that ends there and shares these pages.
                segment_end = min(segment_end, self.max_positions)
            end = max(end, min(-(-sequence.prompt // PAGE), segment_end // PAGE))
        resident = self._table.resident(slot)
        over = len(resident) + end - held_end - self._max_resident
        if over <= 0:
            return
        sequence = self._sequence(slot)
        movable = [entry for entry in resident if SINK <= entry < position // PAGE - self._tail]
        assert len(movable) >= over, "steps are not longer than a segment"
        movable.sort(key=lambda entry: (_score(sequence, entry), sequence.swapped_in_at.get(entry, 0), entry))
        self._swap_out(slot, sequence, sorted(movable[:over]))
        # Copy the likely next ones while the step runs, so that they can be swapped out at once.
        if self._host_bytes + over * self._page_bytes <= self._options.budget:
            self._copy(slot, sequence, sorted(movable[over : 2 * over]), held=True)

    def _rescore(self, slot: int, length: int, tokens: Int32) -> None:
        sequence = self._sequence(slot)
        sequence.scored_at = length
        if self._policy.needs_row and length <= sequence.cached:
            # No row of this sequence has run yet.
            return
        whole = length // PAGE
        try:
            scores = self._policy.scores(slot, tokens, self._table.entries(slot, 0, whole))
        except LuceError as error:
            if not self._failing:
                _log.warning("--kvflash-policy %s: pages could not be scored: %s", self._policy.name, error)
            self._failing = True
            return
        if scores is None:
            return
        self._enforce_budget()
        self._failing = False
        sequence.scores = scores
        self._rescores += 1
        resident = set(self._table.resident(slot))
        fixed = {e for e in range(-(-length // PAGE)) if e < SINK or e >= whole - self._tail}
        # A page that is swapped in stays in host memory, so the next swap-out needs no copy.
        count = max(0, self._max_resident - len(fixed))
        choice = [
            entry
            for entry in range(SINK, whole - self._tail)
            if entry in resident or (entry in sequence.host and scores[entry] > -np.inf)
        ]
        choice.sort(key=lambda entry: (-_score(sequence, entry), entry not in resident, -entry))
        best = set(choice[:count])
        self._hits += len(best & resident)
        self._swap_out(slot, sequence, sorted(e for e in resident - fixed - best if e < whole))
        self._swap_in(slot, sequence, sorted((fixed | best) - resident))

    def _sequence(self, slot: int) -> _PagedSequence:
        return self._sequences.setdefault(slot, _PagedSequence())

    def _swap_out(self, slot: int, sequence: _PagedSequence, entries: Sequence[int]) -> None:
        if not entries:
            return
        pages = self._table.entries(slot, 0, entries[-1] + 1)
        self._policy.before_swap_out(slot, entries, [pages[entry] for entry in entries])
        for saved in {sequence.host[entry][0] for entry in entries if entry in sequence.host} & sequence.copying:
            saved.wait()
            sequence.copying.remove(saved)
        self._copy(slot, sequence, entries)
        self._swapped_out += len(entries)
        self._table.swap_out(slot, entries)
        self._enforce_budget()

    def _swap_in(self, slot: int, sequence: _PagedSequence, entries: Sequence[int]) -> None:
        if not entries:
            return
        self._swapped_in += len(entries)
        self._clock += 1
        pages = dict(zip(entries, self._table.swap_in(slot, entries), strict=True))
        for (saved, first), run in _runs(sequence, entries):
            self._backend.state.restore(None, self._tables.of_full([pages[entry] for entry in run]), saved, first)
        for entry in entries:
            sequence.swapped_in_at[entry] = self._clock

    def _show(self, slot: int, sequence: _PagedSequence, entries: Sequence[int]) -> None:
        """Let the policy see pages that are in host memory only: swap them in and out again."""
        swapped_in_at, resident = dict(sequence.swapped_in_at), self._table.resident(slot)
        guest = resident[SINK : SINK + 1] if len(resident) == self._max_resident else []
        self._swap_out(slot, sequence, guest)
        count = self._max_resident - len(resident) + len(guest)
        for begin in range(0, len(entries), count):
            some = entries[begin : begin + count]
            self._swap_in(slot, sequence, some)
            self._swap_out(slot, sequence, some)
        self._swap_in(slot, sequence, guest)
        sequence.swapped_in_at = swapped_in_at

    # --- host memory

    @property
    def _host_bytes(self) -> int:
        """Bytes of pages and of the policy's data."""
        return self._bytes + self._policy.nbytes

    def _copy(self, slot: int, sequence: _PagedSequence, entries: Sequence[int], *, held: bool = False) -> None:
        """Copy pages to host memory that are not there. `held`: without waiting, as the slot holds the pages."""
        for batch in _batches([entry for entry in entries if entry not in sequence.host]):
            pages = [self._table.entries(slot, entry, entry + 1)[0] for entry in batch]
            saved = self._backend.state.save(None, self._tables.of_full(pages), held=held)
            self._copied += len(batch)
            for index, (entry, page) in enumerate(zip(batch, pages, strict=True)):
                for each in (sequence, *self._sharing(slot, entry, page)):
                    self._remember(each, entry, (saved, index))
                    if held:
                        each.copying.add(saved)

    def _sharing(self, slot: int, entry: int, page: int) -> Iterator[_PagedSequence]:
        """Other sequences that hold a page as the same entry and know no copy of it."""
        for other, sequence in self._sequences.items():
            pages = self._table.entries(other, entry, entry + 1) if entry < self._table.end(other) else []
            if other != slot and pages == [page] and entry not in sequence.host:
                yield sequence

    def _remember(self, sequence: _PagedSequence, entry: int, page: HostPage) -> None:
        saved, _ = page
        sequence.host[entry] = page
        if saved not in self._saved:
            self._bytes += saved.pages * self._page_bytes
        self._saved[saved] = self._saved.get(saved, 0) + 1

    def _forget(self, sequence: _PagedSequence, entry: int) -> None:
        saved, _ = sequence.host.pop(entry)
        self._saved[saved] -= 1
        if not self._saved[saved]:
            del self._saved[saved]
            sequence.copying.discard(saved)
            self._bytes -= saved.pages * self._page_bytes

    def _enforce_budget(self) -> None:
        """Keep host memory within its budget: first drop copies of resident pages, then the pages with the lowest
        scores, which are lost."""
        while self._bytes and self._host_bytes > self._options.budget:
            resident = {slot: set(self._table.resident(slot)) for slot in self._sequences}
            lost, _, slot, entry = min(
                (entry not in resident[slot], _score(sequence, entry), slot, entry)
                for slot, sequence in self._sequences.items()
                for entry in sequence.host
            )
            self._forget(self._sequences[slot], entry)
            if lost:
                if not self._lost:
                    _log.warning("--kvflash-host-mb: host memory is full; the pages with the lowest scores are dropped")
                self._lost += 1
                self._sequences[slot].incomplete = True


def _score(sequence: _PagedSequence, entry: int) -> float:
    """The score of a page. Pages newer than the scores stay until the next round, as newer ones mostly matter more."""
    if sequence.scores is None:
        return 0.0
    return float(sequence.scores[entry]) if entry < len(sequence.scores) else np.inf


def _batches(entries: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(entries), _BATCH):
        yield entries[begin : begin + _BATCH]


def _runs(sequence: _PagedSequence, entries: Iterable[int]) -> Iterator[tuple[HostPage, list[int]]]:
    """(the first one's page, entries) of entries whose pages are consecutive in host memory."""
    run: list[int] = []
    for entry in entries:
        saved, index = sequence.host[entry]
        if run and sequence.host[run[-1]] == (saved, index - 1):
            run.append(entry)
            continue
        if run:
            yield sequence.host[run[0]], run
        run = [entry]
    if run:
        yield sequence.host[run[0]], run
