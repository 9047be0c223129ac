"""The pages on the devices as the cache sees them: whose account it takes part in, and which of them it means."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from luce.kvcache.prefix_tree import Residency, Segment
from luce.runtime.step import PAGE

#: what `Backend.save` and `restore` work on: a slot, None for no state of it, and pages of each page group
Place = tuple[int | None, list[list[int]]]


class PagePool(Protocol):
    """The account of one page group, as far as the cache takes part in it. See luce.kvcache.page_table.PageTable."""

    window: int | None
    total: int
    free: int

    @property
    def longest(self) -> int:
        """Most positions of a sequence."""

    def most(self, length: int) -> int:
        """Most pages of a sequence of `length` positions at one time."""

    def keep(self, page: int) -> None:
        """The cache keeps a page beside the sequences that hold it."""

    def drop(self, page: int) -> None:
        """It does not any longer."""

    def idle(self, page: int) -> bool:
        """Whether nobody but the cache has the page."""

    def share(self, page: int) -> None:
        """Hold a page as a sequence does."""

    def give(self, page: int) -> None:
        """Do not hold it any longer."""

    def seen_from(self, length: int) -> int:
        """The first table entry that a sequence of `length` positions still sees."""

    def entries(self, slot: int, low: int, high: int) -> list[int]:
        """The pages in entries [low, high) of a slot."""

    def resume(self, slot: int, length: int, shared: Sequence[int | None], absent: Collection[int] = ()) -> None:
        """Let a slot hold what a sequence of `length` positions holds, but for the `absent` entries: shared pages, new
        ones where there are none."""

    def leave(self, slot: int, entries: Sequence[int]) -> None:
        """Give back the pages of some entries of a slot, which go on without them."""

    def yield_all(self, slot: int) -> None:
        """Give back what a slot holds."""


class Residence(Protocol):
    """Where the pages are that a long sequence has not on the devices. See luce.kvcache.paging.Pager."""

    def data(self, slot: int, entry: int) -> tuple[Segment, int] | None:
        """The contents of a page, if they are in host memory."""

    def whole(self, slot: int) -> bool:
        """Whether every page of a sequence is somewhere."""

    def snapshot(self, slot: int, length: int) -> Residency | None:
        """Which of its pages are on the devices, None if all are."""

    def absent(self, length: int, residency: Residency | None) -> Collection[int]:
        """The pages of a sequence of `length` positions that are not to be on the devices when it is resumed."""

    def resume(self, slot: int, data: dict[int, tuple[Segment, int]], residency: Residency | None) -> None:
        """A slot holds a sequence, of which these pages are in host memory only. Raises LuceError."""

    def release(self, slot: int) -> None:
        """A slot does not hold it after all."""


class Pools:
    """Those of all page groups. `recurrent`: whether a slot has a state beside them."""

    def __init__(self, groups: Sequence[PagePool], *, recurrent: bool) -> None:
        self.groups = tuple(groups)
        self._recurrent = recurrent
        #: that of full attention, whose pages are shared
        self.full = next((pool for pool in groups if pool.window is None), None)
        #: whether a sequence can be resumed at points only, not behind any block
        self.exact = recurrent or any(pool.window is not None for pool in groups)

    def only(self, pages: list[int]) -> Place:
        """Pages of full attention, and nothing else."""
        return None, [pages if pool is self.full else [] for pool in self.groups]

    def state(self, slot: int, length: int) -> Place:
        """What belongs to a point's state: a slot's recurrent states, windows, and the page that is not full."""
        end, whole = -(-length // PAGE), length // PAGE
        pages = [
            pool.entries(slot, whole if pool.window is None else pool.seen_from(length), end) for pool in self.groups
        ]
        return slot if self._recurrent else None, pages
