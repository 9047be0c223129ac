"""Which sequence holds which page of keys and values. On the host; no page is touched here.

A sequence reserves at admission the most pages that it can ever need, and takes them one by one as it grows. So a
running sequence always finishes: nothing is computed twice and no reply stalls half-way. The price: fewer sequences run
at once if the pools are smaller than all contexts together. The alternative, preemption with recomputation, would
compute prompt rows again just when the machine is busiest.

A reservation is a number, not a choice of pages. Pages that are reserved but not taken can hold other data, as long as
they are freed on demand. There the prefix cache keeps the pages of sequences that ended: it needs no pages of its own.
Sequences may share a page, which counts against each of them; none of them writes to it.

A group may limit the resident pages of a sequence, however long the sequence is: then other pages are swapped out
(luce.kvcache.paging). A row sees the resident pages, in order of position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from luce.backend.backend import Backend
from luce.runtime.step import PAGE, Int32, PageView
from luce.shard.sizes import pages_for


class PageTable:
    """The pages of one page group.

    Entry i of a slot is the page of positions [i * PAGE, (i + 1) * PAGE). A slot holds a range of entries; entries that
    are swapped out are -1.
    """

    def __init__(
        self,
        total: int,
        window: int | None,
        *,
        slots: int,
        context: int,
        chunk: int,
        max_resident: int | None = None,
        branch_pages: int = 0,
    ) -> None:
        self.total = total
        self.window = window
        #: most resident pages of a sequence, None for all that it sees
        self.max_resident = max_resident
        #: pages for the branches of draft trees (luce.engine.draft_tree) during one step; numbered behind `total`
        self.branch_pages = list(range(total, total + branch_pages))
        #: pages that neither a sequence nor the prefix cache holds
        self.free = total
        #: pages that only the prefix cache holds
        self.cached_only = 0
        #: frees pages that only the prefix cache holds until the given number of pages is free
        self.evict: Callable[[int], None] | None = None
        #: swaps pages of a slot out before rows are written: (slot, position, rows)
        self.swap_out_for: Callable[[int, int, int], None] | None = None
        self._context = context
        self._chunk = chunk
        #: pages to be returned to `branch_pages`
        self._branch_debt = 0
        self._reserved = [0] * slots
        self._unreserved = total
        self._taken = bytearray(total) + b"\1" * branch_pages
        #: sequences that hold each page
        self._references = [0] * (total + branch_pages)
        self._cached = bytearray(total + branch_pages)
        self._table = np.zeros((slots, -(-context // PAGE)), np.int32)
        #: a slot's entries are [begin, end)
        self._begin = np.zeros(slots, np.int32)
        self._end = np.zeros(slots, np.int32)

    @property
    def longest(self) -> int:
        """Most positions of a sequence that has the group to itself."""
        fits = self.max_pages(self._context) <= self.total
        return self._context if fits else self.total * PAGE

    def max_pages(self, length: int) -> int:
        """Most pages that a sequence of `length` positions holds at one time."""
        pages = pages_for(self.window, length, self._chunk)
        return pages if self.max_resident is None else min(pages, self.max_resident)

    # --- sequences

    def fits(self, length: int) -> bool:
        """Whether a sequence of `length` positions can reserve its pages now."""
        return self.max_pages(length) <= self._unreserved

    def reserve(self, slot: int, length: int) -> None:
        """Reserve the pages of `length` positions for a slot; `fits` must hold."""
        self._reserved[slot] = self.max_pages(length)
        self._unreserved -= self._reserved[slot]

    def extend(self, slot: int, position: int, rows: int) -> None:
        """Let a slot hold the pages that rows [position, position + rows) write and see, and no earlier ones."""
        if self.window is not None:
            begin, seen = int(self._begin[slot]), self.first_visible(position)
            for entry in range(begin, min(seen, int(self._end[slot]))):
                self.remove_reference(int(self._table[slot, entry]))
            self._begin[slot] = max(begin, seen)
        if self.swap_out_for is not None:
            self.swap_out_for(slot, position, rows)
        self._take_up_to(slot, -(-(position + rows) // PAGE))

    def resume(
        self, slot: int, length: int, shared: Sequence[int | None] = (), swapped_out: Collection[int] = ()
    ) -> None:
        """Let an empty slot hold the pages of a sequence of `length` positions, except for the `swapped_out` entries.

        `shared`: pages of its first entries, which it does not write to; None for a new page, as for all other entries.
        """
        begin = self.first_visible(length)
        self._begin[slot] = self._end[slot] = begin
        end = max(begin + len(shared), -(-length // PAGE))
        found = {i: page for i, page in enumerate(shared, begin) if page is not None and i not in swapped_out}
        # References first: freeing pages for the other entries must not evict these.
        for page in found.values():
            self.add_reference(page)
        try:
            self._free_up(sum(entry not in found and entry not in swapped_out for entry in range(begin, end)))
            for entry in range(begin, end):
                held = -1 if entry in swapped_out else found.get(entry)
                self._table[slot, entry] = self._take(slot, entry) if held is None else held
                self._end[slot] = entry + 1
        except BaseException:
            for entry, page in found.items():
                if entry >= self._end[slot]:
                    self.remove_reference(page)
            raise

    def clear(self, slot: int) -> None:
        """Free all pages of a slot; the reservation stands."""
        for page in self.held(slot):
            self.remove_reference(page)
        self._begin[slot] = self._end[slot] = 0

    def release(self, slot: int) -> None:
        """Free all pages of a slot and its reservation."""
        self.clear(slot)
        self._unreserved += self._reserved[slot]
        self._reserved[slot] = 0

    def first_visible(self, position: int) -> int:
        """The first entry that the row at a position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // PAGE

    def end(self, slot: int) -> int:
        """The entry behind the last one of a slot."""
        return int(self._end[slot])

    def entries(self, slot: int, begin: int, end: int) -> list[int]:
        """The pages of entries [begin, end) of a slot, -1 where an entry is swapped out."""
        pages: list[int] = self._table[slot, begin:end].tolist()
        return pages

    def held(self, slot: int) -> list[int]:
        """The resident pages of a slot in order of position."""
        held: list[int] = self._table[slot, self._begin[slot] : self._end[slot]].tolist()
        return [page for page in held if page >= 0]

    # --- paging

    def resident(self, slot: int) -> list[int]:
        """The entries of a slot whose pages are resident, in order."""
        resident: list[int] = self._resident(slot).tolist()
        return resident

    def swap_out(self, slot: int, entries: Sequence[int]) -> None:
        """Free the pages of some entries of a slot, which keeps the entries."""
        for entry in entries:
            self.remove_reference(int(self._table[slot, entry]))
            self._table[slot, entry] = -1

    def swap_in(self, slot: int, entries: Sequence[int]) -> list[int]:
        """New pages for entries that are swapped out, within `max_resident`."""
        self._free_up(len(entries))
        for entry in entries:
            self._table[slot, entry] = self._take(slot, entry)
        return [int(self._table[slot, entry]) for entry in entries]

    # --- sharing

    def add_reference(self, page: int) -> None:
        """One more sequence holds a page, which another sequence or the prefix cache holds already."""
        self.cached_only -= not self._references[page]
        self._references[page] += 1

    def remove_reference(self, page: int) -> None:
        """One sequence less holds a page."""
        self._references[page] -= 1
        if self._references[page]:
            return
        if self._cached[page]:
            self.cached_only += 1
        else:
            self._taken[page] = 0
            self.free += 1

    def referenced(self, page: int) -> bool:
        """Whether a sequence holds a page."""
        return self._references[page] > 0

    def cache(self, page: int) -> None:
        """The prefix cache holds a page, which a sequence holds already."""
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """The prefix cache no longer holds a page."""
        self._cached[page] = 0
        if not self._references[page]:
            self._taken[page] = 0
            self.cached_only -= 1
            self.free += 1

    # --- draft trees

    def exchange(self, slot: int, entry: int, page: int) -> None:
        """Replace the page of an entry by one of `branch_pages`."""
        old, place = int(self._table[slot, entry]), self.branch_pages.index(page)
        self._table[slot, entry] = page
        self._references[page] = 1
        if self._references[old] == 1 and not self._cached[old]:
            self._references[old] = 0
            self.branch_pages[place] = old
            return
        # The old page is still in use: the next free page becomes a branch page instead.
        self.remove_reference(old)
        del self.branch_pages[place]
        self._branch_debt += 1

    def refill(self) -> int:
        """The number of `branch_pages`, after free pages have replaced those that `exchange` used up."""
        while self._branch_debt and self.free:
            page = self._taken.find(0)
            self._taken[page] = 1
            self.free -= 1
            self._branch_debt -= 1
            self.branch_pages.append(page)
        return len(self.branch_pages)

    def view(self, slots: Int32, row_slots: Int32, positions: Int32) -> PageView:
        """The pages that spans of `slots` (int32 [spans]) see, and where rows are written, which have `row_slots` and
        `positions` (int32 [rows])."""
        if self.max_resident is None:
            low = self._begin[slots]
            count = self._end[slots] - low
            width = int(count.max(initial=0))
            index: Int32 = np.add.outer(low, np.arange(width, dtype=np.int32))
        else:
            resident = [self._resident(slot) for slot in slots.tolist()]
            count = np.array([len(entries) for entries in resident], np.int32)
            index = np.zeros((len(resident), int(count.max(initial=0))), np.int32)
            for row, entries in zip(index, resident, strict=True):
                row[: len(entries)] = entries
        # Entries beyond `count` may be any, but none beyond the table's end.
        table = self._table[slots[:, None], np.minimum(index, self._table.shape[1] - 1)]
        dest = self._table[row_slots, positions // PAGE] * PAGE + positions % PAGE
        first: Int32 = index * PAGE
        return PageView(table=table, first=first, count=count, dest=dest)

    def _resident(self, slot: int) -> Int32:
        begin, end = int(self._begin[slot]), int(self._end[slot])
        resident: Int32 = begin + np.flatnonzero(self._table[slot, begin:end] >= 0).astype(np.int32)
        return resident

    def _free_up(self, count: int) -> None:
        """Evict cached pages until `count` pages are free, if necessary."""
        if count > self.free and self.evict is not None:
            self.evict(count)

    def _take_up_to(self, slot: int, end: int) -> None:
        """Take pages for the entries before `end`."""
        first = int(self._end[slot])
        self._free_up(end - first)
        for entry in range(max(first, int(self._begin[slot])), end):
            self._table[slot, entry] = self._take(slot, entry)
            self._end[slot] = entry + 1

    def _take(self, slot: int, entry: int) -> int:
        """Take a free page for an entry: the one behind the page of the entry before it, or the next free one above, or
        the lowest.

        Each slot begins in its own part of the pool and goes upwards: a sequence that uses no more than its share of
        the pool has consecutive pages, and the host reads consecutive pages without a copy.
        """
        first = entry == self._begin[slot]
        near = slot * self.total // len(self._begin) if first else int(self._table[slot, entry - 1]) + 1
        self._free_up(1)
        page = self._taken.find(0, near)
        if page < 0:
            page = self._taken.find(0)
        self._taken[page] = self._references[page] = 1
        self.free -= 1
        return page


class PageTables:
    """The pages of all page groups. A slot is a sequence's place, 0..slots-1."""

    def __init__(
        self,
        totals: Sequence[int],
        windows: Sequence[int | None],
        *,
        slots: int,
        context: int,
        chunk: int,
        max_resident: int | None = None,
        branch_pages: int = 0,
    ) -> None:
        """`max_resident`: most resident pages of a sequence in the group of full attention."""
        self.groups = tuple(
            PageTable(
                total,
                window,
                slots=slots,
                context=context,
                chunk=chunk,
                max_resident=max_resident if window is None else None,
                branch_pages=branch_pages,
            )
            for total, window in zip(totals, windows, strict=True)
        )
        #: the group of full attention, whose pages the prefix cache shares
        self.full = next((table for table in self.groups if table.window is None), None)
        #: most positions of one sequence, whatever the context
        self.longest = min([context, *(group.longest for group in self.groups)])

    @classmethod
    def over(cls, backend: Backend, chunk: int) -> PageTables:
        """The pages of a backend. `chunk`: rows of a prompt in one step."""
        capacity = backend.capacity
        return cls(
            capacity.pages,
            capacity.windows,
            slots=capacity.slots,
            context=capacity.context,
            chunk=chunk,
            max_resident=capacity.max_resident_pages,
            branch_pages=capacity.branch_pages,
        )

    @property
    def total(self) -> int:
        """Pages of all groups together."""
        return sum(group.total for group in self.groups)

    @property
    def used(self) -> int:
        """Pages that sequences hold now."""
        return sum(group.total - group.free - group.cached_only for group in self.groups)

    @property
    def windowed(self) -> bool:
        """Whether a group has a window: its pages are part of a checkpoint's state."""
        return any(group.window is not None for group in self.groups)

    def refill(self) -> int:
        """Branch pages that every group has."""
        return min((group.refill() for group in self.groups), default=0)

    def reserve(self, slot: int, length: int) -> bool:
        """Reserve the pages of `length` positions for a slot; False, without any change, if a group has too few."""
        if not all(group.fits(length) for group in self.groups):
            return False
        for group in self.groups:
            group.reserve(slot, length)
        return True

    def extend(self, slot: int, position: int, rows: int) -> None:
        """Let a slot hold what rows [position, position + rows) write and see. Cannot fail within the reservation."""
        for group in self.groups:
            group.extend(slot, position, rows)

    def clear(self, slot: int) -> None:
        """Free all pages of a slot; the reservation stands."""
        for group in self.groups:
            group.clear(slot)

    def release(self, slot: int) -> None:
        """Free all pages of a slot and its reservation."""
        for group in self.groups:
            group.release(slot)

    def views(self, slots: Int32, row_slots: Int32, positions: Int32) -> tuple[PageView, ...]:
        """Page views of a step: slots int32 [spans]; row_slots, positions int32 [rows]."""
        return tuple(group.view(slots, row_slots, positions) for group in self.groups)

    def of_full(self, pages: list[int]) -> list[list[int]]:
        """Pages of full attention in the form that a backend takes: a list for each group."""
        return [pages if group is self.full else [] for group in self.groups]

    def of_state(self, slot: int, length: int) -> list[list[int]]:
        """The pages of a checkpoint's state, a list for each group: those of windows, and the one that is not full."""
        end, whole = -(-length // PAGE), length // PAGE
        return [
            group.entries(slot, whole if group.window is None else group.first_visible(length), end)
            for group in self.groups
        ]
