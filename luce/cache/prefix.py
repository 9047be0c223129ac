"""PrefixCache: what sequences computed, kept for those that begin alike.

The pages of full attention stay where they are, in the devices' pools: a later sequence shares them, and writes behind
them only, so nobody ever writes to a shared page. They take up no room of their own, as a sequence is promised pages
long before it takes them; when the pool runs dry, the pages that were of no use for longest move to host memory. What
cannot be shared is copied to the host when it is kept, and into the new sequence's own slot and pages when it is used:
recurrent states, the pages of windowed groups (the last window of them), and the page that is not full yet.

Host memory has a budget in bytes; when it is reached, the coldest points go, and their pages with them.
Everything here runs on the engine's thread, which is the one that may call the backend.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.cache.tree import Block, Point, Tensors, Tree, tensor_bytes
from luce.errors import LuceError
from luce.runtime.step import PAGE, Int32

_log = logging.getLogger(__name__)

# Pages in one copy between host and devices: bounds what lies twice in host memory meanwhile.
_BATCH = 16


class PagePool(Protocol):
    """The account of one page group, as far as the cache takes part in it. See luce.engine.pages.GroupPages."""

    window: int | None
    free: int

    def keep(self, page: int) -> None:
        """The cache keeps a page beside the sequences that hold it."""

    def drop(self, page: int) -> None:
        """It does not any longer."""

    def idle(self, page: int) -> bool:
        """Whether nobody but the cache has the page."""

    def seen_from(self, length: int) -> int:
        """The first table entry that a sequence of `length` positions still sees."""

    def entries(self, slot: int, low: int, high: int) -> list[int]:
        """The pages in entries [low, high) of a slot."""

    def resume(self, slot: int, length: int, shared: Sequence[int | None]) -> None:
        """Let a slot hold what a sequence of `length` positions holds: shared pages, new ones where there are none."""


@dataclass(frozen=True)
class Hit:
    """Where a prompt can be resumed: behind `blocks`, at `point` if that is not None. `length` positions are there."""

    length: int
    blocks: tuple[Block, ...]
    point: Point | None


@dataclass(frozen=True)
class CacheStats:
    """Numbers at one moment; counters since the start. `bytes` of host memory, `pages` on the devices."""

    bytes: int = 0
    budget: int = 0
    points: int = 0
    pages: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    tokens: int = 0


class PrefixCache:
    """Over the pools of `backend`, one per page group; `budget` in bytes of host memory."""

    def __init__(self, backend: Backend, pools: Sequence[PagePool], budget: int) -> None:
        self._backend = backend
        self._pools = tuple(pools)
        self._full = next((i for i, pool in enumerate(pools) if pool.window is None), None)
        self._budget = budget
        self._bytes = self._pages = 0
        self._hits = self._misses = self._evictions = self._tokens = 0
        self.tree = Tree()
        #: whether a sequence can be resumed at points only, not behind any block
        self.exact = backend.recurrent or any(pool.window is not None for pool in pools)

    def stats(self) -> CacheStats:
        """Numbers for people. Any thread may ask."""
        return CacheStats(
            bytes=self._bytes,
            budget=self._budget,
            points=len(self.tree.points),
            pages=self._pages,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            tokens=self._tokens,
        )

    def find(self, prompt: Int32) -> tuple[Hit | None, int]:
        """The longest prefix of a prompt that can be resumed, and how many positions are known beyond any point.

        A whole prompt needs the logits of its last token, so it is resumed only at a point that has them.
        """
        blocks, points = self.tree.match(prompt)
        usable = [p for p in points if p.length < len(prompt) or p.logits is not None]
        point = usable[-1] if usable else None
        length = 0 if point is None else point.length
        known = len(blocks) * PAGE
        free = min(known, (len(prompt) - 1) // PAGE * PAGE)
        if not self.exact and free > length:
            return Hit(free, tuple(blocks[: free // PAGE]), None), known
        if point is None:
            return None, known
        return Hit(length, tuple(blocks[: length // PAGE]), point), known

    def resume(self, hit: Hit | None, slot: int) -> bool:
        """Put what was found into a slot that holds nothing yet. False if that failed: the slot's pages are undefined.

        A None counts as a miss.
        """
        if hit is None:
            self._misses += 1
            return True
        # What is read below must not go when pages are taken for it.
        absent = [(i, block, block.data) for i, block in enumerate(hit.blocks) if block.page is None]
        for group, pool in enumerate(self._pools):
            pool.resume(slot, hit.length, [block.page for block in hit.blocks] if group == self._full else ())
        try:
            self._restore(hit, slot, absent)
        except LuceError as error:
            _log.warning("a cached prefix could not be restored: %s", error)
            return False
        if hit.point is not None:
            hit.point.stale = False
        self._hits += 1
        self._tokens += hit.length
        return True

    def keep(
        self,
        slot: int,
        ids: Int32,
        logits: NDArray[np.float32] | None = None,
        *,
        passing: bool,
        after: Point | None = None,
    ) -> Point | None:
        """Keep what a slot holds: the state after exactly `ids`. None if that failed.

        `after`: the point of the same sequence that this one follows; it becomes stale if it is a passing one.
        """
        point = self.tree.find(ids)
        if point is None:
            try:
                state = self._backend.save(self._state_slot(slot), self._state_pages(slot, len(ids)))
            except LuceError as error:
                _log.warning("a prefix could not be kept: %s", error)
                return None
            point = self.tree.add(ids, state, None, passing=passing)
            self._bytes += point.nbytes
        if point.logits is None and logits is not None:
            point.logits = logits
            self._bytes += logits.nbytes
        point.passing &= passing
        point.stale = False
        if after is not None and after is not point:
            after.stale = after.passing
        if self._full is not None:
            trail = self.tree.trail(point)
            for block, page in zip(trail, self._pools[self._full].entries(slot, 0, len(trail)), strict=True):
                if block.page is None:
                    self._place(block, page)
        self._make_room(0)
        return point

    def reclaim(self, count: int) -> None:
        """Give up pages of full attention until `count` are free. There must be as many free or idle ones."""
        assert self._full is not None
        pool = self._pools[self._full]
        while pool.free < count:
            idle = (block for block in self.tree.blocks if block.page is not None and pool.idle(block.page))
            coldest = nsmallest(min(count - pool.free, _BATCH), idle, key=lambda block: (block.used, -block.index))
            for block in coldest:
                if block.data is not None:
                    self._displace(block)
            lacking = [block for block in coldest if block.data is None]
            if lacking and not self._spill(lacking):
                self.clear()

    def clear(self) -> None:
        """Forget everything."""
        while self.tree.points:
            self._evict(next(iter(self.tree.points)))

    # What follows moves data.

    def _restore(self, hit: Hit, slot: int, absent: Sequence[tuple[int, Block, Tensors | None]]) -> None:
        if self._full is not None:
            pages = self._pools[self._full].entries(slot, 0, len(hit.blocks))
            for begin in range(0, len(absent), _BATCH):
                batch = absent[begin : begin + _BATCH]
                data = [tensors for _, _, tensors in batch if tensors is not None]
                joined = {name: np.concatenate([tensors[name] for tensors in data]) for name in data[0]}
                self._backend.restore(None, self._only(self._full, [pages[i] for i, _, _ in batch]), joined)
                for i, block, _ in batch:
                    if block.alive:
                        self._place(block, pages[i])
        if hit.point is not None:
            self._backend.restore(self._state_slot(slot), self._state_pages(slot, hit.length), hit.point.state)

    def _state_slot(self, slot: int) -> int | None:
        return slot if self._backend.recurrent else None

    def _state_pages(self, slot: int, length: int) -> list[list[int]]:
        """The pages of each group that belong to a point's state."""
        end, whole = -(-length // PAGE), length // PAGE
        return [
            pool.entries(slot, whole if pool.window is None else pool.seen_from(length), end) for pool in self._pools
        ]

    def _only(self, group: int, pages: list[int]) -> list[list[int]]:
        """Pages of one group and none of the others."""
        return [pages if i == group else [] for i in range(len(self._pools))]

    def _spill(self, blocks: list[Block]) -> bool:
        """Move blocks to host memory, or give them up if there can be no room for them. False if the copy failed."""
        assert self._full is not None
        try:
            tensors = self._backend.save(None, self._only(self._full, [b.page for b in blocks if b.page is not None]))
        except LuceError as error:
            _log.warning("the prefix cache is dropped: %s", error)
            return False
        self._make_room(tensor_bytes(tensors))
        for index, block in enumerate(blocks):
            if block.alive:
                rows = slice(index * PAGE, (index + 1) * PAGE)
                block.data = {name: tensor[rows].copy() for name, tensor in tensors.items()}
                self._bytes += tensor_bytes(block.data)
                self._displace(block)
        return True

    def _place(self, block: Block, page: int) -> None:
        assert self._full is not None
        block.page = page
        self._pools[self._full].keep(page)
        self._pages += 1

    def _displace(self, block: Block) -> None:
        assert self._full is not None and block.page is not None
        self._pools[self._full].drop(block.page)
        block.page = None
        self._pages -= 1

    def _make_room(self, size: int) -> None:
        """Give up points until `size` more bytes fit, copies of what is on the devices before anything else."""
        if self._bytes + size <= self._budget:
            return
        for block in self.tree.blocks:
            if block.data is not None and block.page is not None:
                self._bytes -= tensor_bytes(block.data)
                block.data = None
        while self._bytes + size > self._budget and (coldest := self.tree.coldest()) is not None:
            self._evict(coldest)
            self._evictions += 1

    def _evict(self, point: Point) -> None:
        self._bytes -= point.nbytes
        for block in self.tree.remove(point):
            if block.page is not None:
                self._displace(block)
            if block.data is not None:
                self._bytes -= tensor_bytes(block.data)
                block.data = None
