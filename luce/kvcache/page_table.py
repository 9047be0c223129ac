"""Host-side account of KV pages: which sequence holds which page of which group.

A sequence reserves at admission the most pages that it can ever need, and takes them one by one as it grows. So a
running sequence always finishes: nothing is computed twice and no reply stalls half-way. The price is that fewer
sequences run at once where the pools are smaller than all contexts together; the alternative, preemption with
recomputation, would pay with prompt rows computed again just when the machine is busiest.

Reservation is a count, not a choice of pages: pages that are reserved but not taken yet are free for whoever gives them
back on demand. That is where the prefix cache (luce.kvcache) keeps the pages of sequences that ended: it needs no pages
of its own. Sequences may share a page, which each counts as its own; nobody writes to such a page.

A group may be bounded: then a sequence has so many pages at most, however long it is, and those that it cannot hold any
longer leave (luce.kvcache.paging). What its rows see is what is there, in order of position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from luce.backend.backend import Backend
from luce.runtime.step import PAGE, Int32, PageView
from luce.shard.sizes import pages_for


class PageTable:
    """The pages of one group.

    table int32 [slots, width]: entry i of a row is the page of positions [i * PAGE, (i + 1) * PAGE); a slot holds the
    entries low[slot] .. high[slot] - 1, but for those that have left, which are -1.

    bound    most pages of a sequence, None if it holds all that it sees
    branch_pages  pages for branches of trees (luce.engine.draft_tree), beside the `total` ones, for one step at a time
    free     pages that nobody has
    spare    pages that only the prefix cache has
    reclaim  called when more than `free` pages are needed; has to free so many, of those that are spare
    relieve  called before pages of a bounded group are taken, with a slot, a position and a number of rows: has to let
             pages before that position `leave` until those that these rows write fit
    """

    def __init__(
        self,
        total: int,
        window: int | None,
        *,
        slots: int,
        context: int,
        chunk: int,
        bound: int | None = None,
        branch_pages: int = 0,
    ) -> None:
        self.total = total
        self.branch_pages = list(range(total, total + branch_pages))
        self.free = total
        self.spare = 0
        self.window = window
        self.bound = bound
        self.reclaim: Callable[[int], None] | None = None
        self.relieve: Callable[[int, int, int], None] | None = None
        self._context = context
        self._chunk = chunk
        self._owed = 0
        self._reserved = [0] * slots
        self._unreserved = total
        self._taken = bytearray(total) + b"\1" * branch_pages
        self._holders = [0] * (total + branch_pages)
        self._kept = bytearray(total + branch_pages)
        self._table = np.zeros((slots, -(-context // PAGE)), np.int32)
        self._low = np.zeros(slots, np.int32)
        self._high = np.zeros(slots, np.int32)

    @property
    def longest(self) -> int:
        """Most positions of a sequence that has the group to itself."""
        fits = self.most(self._context) <= self.total
        return self._context if fits else self.total * PAGE

    def most(self, length: int) -> int:
        """Pages that a sequence of `length` positions holds at most at one time."""
        pages = pages_for(self.window, length, self._chunk)
        return pages if self.bound is None else min(pages, self.bound)

    def fits(self, length: int) -> bool:
        """Whether a sequence of `length` positions can be promised its pages now."""
        return self.most(length) <= self._unreserved

    def reserve(self, slot: int, length: int) -> None:
        """Promise a slot the pages of `length` positions; `fits` must hold."""
        self._reserved[slot] = self.most(length)
        self._unreserved -= self._reserved[slot]

    def extend(self, slot: int, position: int, rows: int) -> None:
        """Hold the pages that rows [position, position + rows) write and see, and no others before them."""
        if self.window is not None:
            low, seen = int(self._low[slot]), self.seen_from(position)
            for index in range(low, min(seen, int(self._high[slot]))):
                self.give(int(self._table[slot, index]))
            self._low[slot] = max(low, seen)
        if self.relieve is not None:
            self.relieve(slot, position, rows)
        self._hold(slot, -(-(position + rows) // PAGE))

    def leave(self, slot: int, entries: Sequence[int]) -> None:
        """Give back the pages of some entries of a slot, which go on without them."""
        for index in entries:
            self.give(int(self._table[slot, index]))
            self._table[slot, index] = -1

    def exchange(self, slot: int, entry: int, page: int) -> None:
        """Let a slot have one of `branch_pages` as an entry, instead of the page that it holds there."""
        old, place = int(self._table[slot, entry]), self.branch_pages.index(page)
        self._table[slot, entry] = page
        self._holders[page] = 1
        if self._holders[old] == 1 and not self._kept[old]:
            self._holders[old] = 0
            self.branch_pages[place] = old
            return
        # Somebody else still reads it: as soon as a page is free, that one is for branches.
        self.give(old)
        del self.branch_pages[place]
        self._owed += 1

    def refill(self) -> int:
        """Pages that there are for branches, now that those which `exchange` could not give are made up for."""
        while self._owed and self.free:
            page = self._taken.find(0)
            self._taken[page] = 1
            self.free -= 1
            self._owed -= 1
            self.branch_pages.append(page)
        return len(self.branch_pages)

    def enter(self, slot: int, entries: Sequence[int]) -> list[int]:
        """New pages for entries that have left; there must be room for them within the bound."""
        if len(entries) > self.free and self.reclaim is not None:
            self.reclaim(len(entries))
        for index in entries:
            self._table[slot, index] = self._next(slot, index)
        return [int(self._table[slot, index]) for index in entries]

    def present(self, slot: int) -> list[int]:
        """The entries of a slot whose pages are there, in order."""
        present: list[int] = self._present(slot).tolist()
        return present

    def high(self, slot: int) -> int:
        """The entry behind the last one of a slot."""
        return int(self._high[slot])

    def resume(self, slot: int, length: int, shared: Sequence[int | None] = (), absent: Collection[int] = ()) -> None:
        """Let a slot that holds nothing hold what a sequence of `length` positions holds, but for the `absent` entries.

        `shared`: pages of its first entries, which it does not write to; None where it takes a new one, or none.
        """
        low = self.seen_from(length)
        self._low[slot] = self._high[slot] = low
        end = max(low + len(shared), -(-length // PAGE))
        there = {index: page for index, page in enumerate(shared, low) if page is not None and index not in absent}
        # First those that are there, so that making room for the others cannot take them away.
        for page in there.values():
            self.share(page)
        lacking = sum(index not in there and index not in absent for index in range(low, end))
        if lacking > self.free and self.reclaim is not None:
            self.reclaim(lacking)
        for index in range(low, end):
            held = -1 if index in absent else there.get(index)
            self._table[slot, index] = self._next(slot, index) if held is None else held
            self._high[slot] = index + 1

    def yield_all(self, slot: int) -> None:
        """Give back everything that a slot holds; the promise stands."""
        for page in self.held(slot):
            self.give(page)
        self._low[slot] = self._high[slot] = 0

    def release(self, slot: int) -> None:
        """Give back everything that a slot holds and was promised."""
        self.yield_all(slot)
        self._unreserved += self._reserved[slot]
        self._reserved[slot] = 0

    def seen_from(self, position: int) -> int:
        """The first entry that the row at a position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // PAGE

    def entries(self, slot: int, low: int, high: int) -> list[int]:
        """The pages of entries [low, high) of a slot, -1 where it does not hold them."""
        pages: list[int] = self._table[slot, low:high].tolist()
        return pages

    def keep(self, page: int) -> None:
        """The prefix cache has a page beside the sequences that hold it."""
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """The prefix cache gives a page up."""
        self._kept[page] = 0
        if not self._holders[page]:
            self._taken[page] = 0
            self.spare -= 1
            self.free += 1

    def share(self, page: int) -> None:
        """Somebody holds a page that another one has already."""
        self.spare -= not self._holders[page]
        self._holders[page] += 1

    def give(self, page: int) -> None:
        """Somebody does not hold a page any longer."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._kept[page]:
            self.spare += 1
        else:
            self._taken[page] = 0
            self.free += 1

    def idle(self, page: int) -> bool:
        """Whether no sequence holds a page."""
        return not self._holders[page]

    def held(self, slot: int) -> list[int]:
        """Pages of a slot in order of position."""
        held: list[int] = self._table[slot, self._low[slot] : self._high[slot]].tolist()
        return [page for page in held if page >= 0]

    def view(self, slots: Int32, row_slots: Int32, positions: Int32) -> PageView:
        """What spans of `slots` see; `row_slots` and `positions` int32 [rows] say where rows are written."""
        if self.bound is None:
            low = self._low[slots]
            count = self._high[slots] - low
            width = int(count.max(initial=0))
            index: Int32 = np.add.outer(low, np.arange(width, dtype=np.int32))
        else:
            present = [self._present(slot) for slot in slots.tolist()]
            count = np.array([len(entries) for entries in present], np.int32)
            index = np.zeros((len(present), int(count.max(initial=0))), np.int32)
            for row, entries in zip(index, present, strict=True):
                row[: len(entries)] = entries
        # Entries beyond `count` may be anything, but not beyond the table's end.
        table = self._table[slots[:, None], np.minimum(index, self._table.shape[1] - 1)]
        dest = self._table[row_slots, positions // PAGE] * PAGE + positions % PAGE
        first: Int32 = index * PAGE
        return PageView(table=table, first=first, count=count, dest=dest)

    def _present(self, slot: int) -> Int32:
        low, high = int(self._low[slot]), int(self._high[slot])
        present: Int32 = low + np.flatnonzero(self._table[slot, low:high] >= 0).astype(np.int32)
        return present

    def _hold(self, slot: int, end: int) -> None:
        """Take pages up to entry `end`."""
        high = int(self._high[slot])
        if end - high > self.free and self.reclaim is not None:
            self.reclaim(end - high)
        for index in range(max(high, int(self._low[slot])), end):
            self._table[slot, index] = self._next(slot, index)
            self._high[slot] = end

    def _next(self, slot: int, index: int) -> int:
        """A free page for an entry: the one behind the entry before it, or the next free one above it, or the lowest.

        Each slot begins in its own part of the pool and goes on upwards: pages of a sequence that has its full share of
        the pool are consecutive, and consecutive pages are read on the host without a copy.
        """
        first = index == self._low[slot]
        near = slot * self.total // len(self._low) if first else int(self._table[slot, index - 1]) + 1
        if not self.free and self.reclaim is not None:
            self.reclaim(1)
        page = self._taken.find(0, near)
        if page < 0:
            page = self._taken.find(0)
        self._taken[page] = self._holders[page] = 1
        self.free -= 1
        return page


class PageTables:
    """The pages of all groups. A slot is a sequence's place, 0..slots-1."""

    def __init__(
        self,
        totals: Sequence[int],
        windows: Sequence[int | None],
        *,
        slots: int,
        context: int,
        chunk: int,
        bound: int | None = None,
        branch_pages: int = 0,
    ) -> None:
        """`bound`: most pages of a sequence in groups of full attention."""
        self.groups = tuple(
            PageTable(
                total,
                window,
                slots=slots,
                context=context,
                chunk=chunk,
                bound=bound if window is None else None,
                branch_pages=branch_pages,
            )
            for total, window in zip(totals, windows, strict=True)
        )
        #: most positions of one sequence, be the context as long as it may
        self.longest = min([context, *(group.longest for group in self.groups)])

    @classmethod
    def over(cls, backend: Backend, chunk: int) -> PageTables:
        """The pages that a backend has."""
        capacity = backend.capacity
        return cls(
            capacity.pages,
            capacity.windows,
            slots=capacity.slots,
            context=capacity.context,
            chunk=chunk,
            bound=capacity.max_resident_pages,
            branch_pages=capacity.branch_pages,
        )

    @property
    def total(self) -> int:
        """Pages of all groups together."""
        return sum(group.total for group in self.groups)

    @property
    def used(self) -> int:
        """Pages that sequences hold now."""
        return sum(group.total - group.free - group.spare for group in self.groups)

    def refill(self) -> int:
        """Pages that every group has for branches of trees."""
        return min((group.refill() for group in self.groups), default=0)

    def reserve(self, slot: int, length: int) -> bool:
        """Promise `slot` the pages of `length` positions; False, and nothing changed, if a group has too few."""
        if not all(group.fits(length) for group in self.groups):
            return False
        for group in self.groups:
            group.reserve(slot, length)
        return True

    def extend(self, slot: int, position: int, rows: int) -> None:
        """Hold what rows [position, position + rows) of a slot write and see. Cannot fail within the reservation."""
        for group in self.groups:
            group.extend(slot, position, rows)

    def yield_all(self, slot: int) -> None:
        """Give back everything that a slot holds; the promise stands."""
        for group in self.groups:
            group.yield_all(slot)

    def release(self, slot: int) -> None:
        """Give back everything of a slot."""
        for group in self.groups:
            group.release(slot)

    def views(self, slots: Int32, row_slots: Int32, positions: Int32) -> tuple[PageView, ...]:
        """Page views of a step: slots int32 [spans]; row_slots, positions int32 [rows]."""
        return tuple(group.view(slots, row_slots, positions) for group in self.groups)
