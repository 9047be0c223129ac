"""MemoryTier: blocks on the devices or in host memory, points with their states, and what goes when there is no room.

The pages of full attention stay where they are, in the devices' pools: they take up no room of their own, as a sequence
is promised pages long before it takes them; when the pool runs dry, the pages that were of no use for longest move to
host memory. Host memory has a budget in bytes; when it is reached, the coldest points go, and their pages with them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.draft.feature_tail import FeatureTail
from luce.errors import LuceError
from luce.kvcache.pools import Pools, Residence
from luce.kvcache.prefix_tree import Checkpoint, PageNode, Segment, Tree
from luce.runtime.step import Int32
from luce.shard.saved_state import SavedState

_log = logging.getLogger(__name__)

#: pages that are copied to host memory together, and lie in one frame of a file
BATCH = 32
# Bytes of host memory for pages that are made ready at the start: what a snapshot of a large model passes through.
_READY = 512 << 20


class MemoryTier:
    """Over the pools of `backend`.

    `budget` in bytes of host memory. `residence`: of sequences that may be longer than what they have on the devices.
    """

    def __init__(self, backend: Backend, pools: Pools, budget: int, residence: Residence | None) -> None:
        self._backend = backend
        self._pools = pools
        self._residence = residence
        self.budget = budget
        self.tree = Tree()
        #: bytes of host memory, pages on the devices, points that were given up for others
        self.bytes = self.pages = self.evictions = 0
        #: of these pages, those that are nowhere else
        self._alone = 0
        #: pages that are held while they are copied, and the copy
        self._copying: tuple[SavedState, list[int]] | None = None
        self._page_bytes = max(1, backend.capacity.page_bytes)
        backend.state.reserve(min(budget, _READY) // self._page_bytes)

    def keep(
        self, slot: int, ids: Int32, logits: NDArray[np.float32] | None, features: FeatureTail | None, *, passing: bool
    ) -> Checkpoint:
        """The point at `ids`, which a slot holds: a new one with its state, or one that may lack logits, features or
        pages. Others make room for it. Raises LuceError."""
        point = self.tree.find(ids) or self._add(slot, ids, passing=passing)
        if point.logits is None and logits is not None:
            point.logits = logits
            self.bytes += logits.nbytes
        if point.features is None and features is not None:
            point.features = features
            self.bytes += features.nbytes
        if self._pools.full is not None:
            blocks = self.shared(point)
            for block, page in zip(blocks, self._pools.full.entries(slot, 0, len(blocks)), strict=True):
                if page < 0:
                    self._borrow(block, slot)
                elif block.page is None:
                    self.place(block, page)
        self._make_room(0)
        self._foresee()
        return point

    def shared(self, point: Checkpoint) -> list[PageNode]:
        """The blocks before a point, in order of position; none if no pages are shared."""
        return [] if self._pools.full is None else self.tree.trail(point)

    def place(self, block: PageNode, page: int) -> None:
        """A block is on the devices, in a page that some slot holds."""
        assert self._pools.full is not None
        block.page = page
        self._pools.full.keep(page)
        self.pages += 1
        self._alone += block.data is None

    def copies(self, blocks: Sequence[tuple[int, PageNode]]) -> dict[int, tuple[Segment, int]]:
        """Where the contents of blocks are in host memory, into which they are copied if they are not there yet."""
        data = {index: block.data for index, block in blocks if block.data is not None}
        lacking = [(index, block.page) for index, block in blocks if block.data is None and block.page is not None]
        for begin in range(0, len(lacking), BATCH):
            batch = lacking[begin : begin + BATCH]
            segment = Segment(self._backend.state.save(*self._pools.only([page for _, page in batch])), len(batch))
            data |= {index: (segment, at) for at, (index, _) in enumerate(batch)}
        return data

    def on_host(self, blocks: Sequence[PageNode]) -> Generator[SavedState, None, tuple[SavedState, int]]:
        """Where blocks that are alike lie in host memory, and which page is the first; gives what it waits for."""
        if blocks[0].data is not None:
            segment, at = blocks[0].data
            return segment.kept, at
        assert self._pools.full is not None
        pages = [block.page for block in blocks if block.page is not None]
        kept = self._backend.state.save(*self._pools.only(pages), held=True)
        if not kept.ready():
            for page in pages:
                self._pools.full.share(page)
            self._copying = kept, pages
            try:
                while self._copying is not None and not kept.ready():
                    yield kept
            finally:
                self._landed()
        # As long as there is room, they need not be copied again to leave it to others on the devices.
        free = all(block.alive and block.data is None for block in blocks)
        if free and self.bytes + kept.nbytes <= self.budget:
            segment = Segment(kept, len(blocks))
            for index, block in enumerate(blocks):
                self._copied(block, segment, index)
            self._foresee()
        return kept, 0

    def reclaim(self, count: int) -> None:
        """Give up pages of full attention until `count` are free. There must be as many free or idle ones."""
        pool = self._pools.full
        assert pool is not None
        while pool.free < count:
            idle = [block for block in self.tree.blocks if block.page is not None and pool.idle(block.page)]
            if len(idle) < count - pool.free:
                with contextlib.suppress(LuceError):
                    self._landed()
            coldest = nsmallest(count - pool.free, idle, key=lambda block: (block.used, -block.index))
            for block in coldest:
                if block.data is not None:
                    self._displace(block)
            lacking = sorted((b for b in coldest if b.data is None), key=lambda block: (block.used, block.index))
            for begin in range(0, len(lacking), BATCH):
                batch = [block for block in lacking[begin : begin + BATCH] if block.alive]
                if batch and not self._spill(batch):
                    self.clear()
                    break
        self._foresee()

    def clear(self) -> None:
        """Forget everything."""
        while self.tree.points:
            self._evict(next(iter(self.tree.points)))
        self._foresee()

    def _add(self, slot: int, ids: Int32, *, passing: bool) -> Checkpoint:
        """A new point with the state of a slot. Raises LuceError."""
        state = self._backend.state.save(*self._pools.state(slot, len(ids)))
        self.bytes += state.nbytes
        point = self.tree.add(ids, state, None, passing=passing)
        if self._residence is not None:
            point.residency = self._residence.snapshot(slot, len(ids))
        return point

    def _borrow(self, block: PageNode, slot: int) -> None:
        """A block is in host memory only, where the sequence in a slot has it."""
        if block.data is None and block.page is None:
            assert self._residence is not None
            data = self._residence.data(slot, block.index)
            assert data is not None, "a sequence of which a page is lost is not kept"
            self._copied(block, *data)

    def _landed(self) -> None:
        """Wait for pages that are copied, and do not hold them any longer."""
        if self._copying is None:
            return
        assert self._pools.full is not None
        kept, pages = self._copying
        self._copying = None
        try:
            kept.wait()
        finally:
            for page in pages:
                self._pools.full.give(page)

    def _foresee(self) -> None:
        """Have host memory made for the pages that the next sequence may push out of the devices, as far as they may
        move there, also those of sequences that run still: pinning takes so long that it would wait for most of it."""
        pool = self._pools.full
        if pool is not None:
            alone = self._alone + pool.total - pool.free - self.pages
            pushed = pool.most(pool.longest) - pool.free
            room = (self.budget - self.bytes) // self._page_bytes
            self._backend.state.reserve(max(0, min(alone, pushed, room)))

    def _copied(self, block: PageNode, segment: Segment, at: int) -> None:
        """A block is page `at` of a segment as well."""
        block.data = segment, at
        self.bytes += segment.page_bytes
        self._alone -= block.page is not None

    def _uncopied(self, block: PageNode) -> None:
        """A block is not in host memory any longer, if it was."""
        if block.data is not None:
            self.bytes -= block.data[0].page_bytes
            block.data = None
            self._alone += block.page is not None

    def _spill(self, blocks: list[PageNode]) -> bool:
        """Move blocks to host memory, or give them up if there can be no room for them. False if the copy failed."""
        try:
            kept = self._backend.state.save(*self._pools.only([b.page for b in blocks if b.page is not None]))
            segment = Segment(kept, len(blocks))
            self._make_room(kept.nbytes)
        except LuceError as error:
            _log.warning("the prefix cache is dropped: %s", error)
            return False
        for index, block in enumerate(blocks):
            if block.alive:
                self._copied(block, segment, index)
                self._displace(block)
        return True

    def _displace(self, block: PageNode) -> None:
        assert self._pools.full is not None and block.page is not None
        self._pools.full.drop(block.page)
        block.page = None
        self.pages -= 1
        self._alone -= block.data is None

    def _make_room(self, size: int) -> None:
        """Give up points until `size` more bytes fit, copies of what is on the devices before anything else."""
        if self.bytes + size <= self.budget:
            return
        twice = [block for block in self.tree.blocks if block.data is not None and block.page is not None]
        for block in sorted(twice, key=lambda block: block.used):
            if self.bytes + size > self.budget:
                self._uncopied(block)
        while self.bytes + size > self.budget and (coldest := self.tree.coldest()) is not None:
            self._evict(coldest)
            self.evictions += 1

    def _evict(self, point: Checkpoint) -> None:
        self.bytes -= point.nbytes
        for block in self.tree.remove(point):
            if block.page is not None:
                self._displace(block)
            self._uncopied(block)
