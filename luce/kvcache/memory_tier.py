"""The RAM tier of the prefix cache: pages on the devices or in host memory, checkpoints with their states, and
eviction.

Pages of full attention stay where they are, in the devices' pools. They need no memory of their own, as sequences
reserve pages long before they take them. When a pool runs dry, the least recently used pages move to host memory. Host
memory has a budget in bytes; when it is reached, checkpoints are evicted, and their pages with them.
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
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import Pager
from luce.kvcache.prefix_ids import PrefixIds
from luce.kvcache.prefix_tree import Checkpoint, HostPage, PageNode, PrefixTree
from luce.shard.saved_state import SavedState

_log = logging.getLogger(__name__)

#: pages that are copied to host memory together, and lie in one frame of a file
BATCH = 32
#: bytes of host memory for pages that are prepared at the start: a snapshot of a large model passes through it
PREPARED_BYTES = 512 << 20


class MemoryTier:
    """Checkpoints in the memory of host and devices. `budget`: bytes of host memory."""

    def __init__(self, backend: Backend, tables: PageTables, budget: int, pager: Pager | None) -> None:
        self._backend = backend
        self._tables = tables
        self._full = tables.full
        self._pager = pager
        self.budget = budget
        self.tree = PrefixTree()
        #: bytes of host memory in use
        self.bytes = 0
        #: pages on the devices
        self.pages = 0
        #: of these, the pages without a copy in host memory
        self.device_only = 0
        #: checkpoints evicted to free host memory
        self.evictions = 0
        #: a copy to host memory in progress, and the pages that are held for it
        self._copying: tuple[SavedState, list[int]] | None = None
        backend.state.reserve(min(budget, PREPARED_BYTES) // max(1, self.page_bytes))
        if self._full is not None:
            self._full.evict = self.evict_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of host memory for one page: they depend on the placement, behind whose changes the tier is empty."""
        return self._backend.capacity.page_bytes

    def save(
        self,
        slot: int,
        ids: PrefixIds,
        logits: NDArray[np.float32] | None,
        features: FeatureTail | None,
        *,
        interim: bool,
    ) -> Checkpoint:
        """Save a checkpoint at `ids`, which a slot holds. An existing one gets the logits, features and pages that it
        lacks. Evicts others if necessary. Raises LuceError."""
        existing = self.tree.find(ids)
        checkpoint = existing or self._add(slot, ids, interim=interim)
        try:
            self._complete(checkpoint, slot, logits, features)
        except BaseException:
            # No later sequence may find a page that lies nowhere.
            if existing is None:
                self._evict(checkpoint)
            raise
        self._make_room(0)
        self._reserve_host_memory()
        return checkpoint

    def _complete(
        self, checkpoint: Checkpoint, slot: int, logits: NDArray[np.float32] | None, features: FeatureTail | None
    ) -> None:
        """Give a checkpoint the logits, features and pages that it lacks."""
        if checkpoint.logits is None and logits is not None:
            checkpoint.logits = logits
            self.bytes += logits.nbytes
        if checkpoint.features is None and features is not None:
            checkpoint.features = features
            self.bytes += features.nbytes
        if self._full is not None:
            nodes = self.nodes(checkpoint)
            for node, page in zip(nodes, self._full.entries(slot, 0, len(nodes)), strict=True):
                if page < 0:
                    self._share_host_page(node, slot)
                elif node.page is None:
                    self.place(node, page)

    def nodes(self, checkpoint: Checkpoint) -> list[PageNode]:
        """The nodes before a checkpoint, in order of position; none if the model has no full attention."""
        return [] if self._full is None else self.tree.path(checkpoint)

    def place(self, node: PageNode, page: int) -> None:
        """A node's page is on the devices: `page`, which a slot holds."""
        assert self._full is not None
        node.page = page
        self._full.cache(page)
        self.pages += 1
        self.device_only += node.host is None

    def state_place(self, slot: int, length: int) -> tuple[int | None, list[list[int]]]:
        """The slot and pages that `Backend.state` saves and restores for the state of a checkpoint."""
        return slot if self._backend.capacity.recurrent else None, self._tables.of_state(slot, length)

    def host_pages(self, nodes: Sequence[tuple[int, PageNode]]) -> dict[int, HostPage]:
        """By the given numbers, where the pages of nodes lie in host memory. Copies those that are not there."""
        found = {number: node.host for number, node in nodes if node.host is not None}
        rest = [(number, node.page) for number, node in nodes if node.host is None and node.page is not None]
        for begin in range(0, len(rest), BATCH):
            batch = rest[begin : begin + BATCH]
            saved = self._save_pages([page for _, page in batch])
            found |= {number: (saved, index) for index, (number, _) in enumerate(batch)}
        return found

    def saved_pages(self, nodes: Sequence[PageNode]) -> Generator[SavedState, None, HostPage]:
        """The first host page of nodes that are all on the devices, or consecutive in host memory.

        Yields a copy in progress each time that the caller may wait for it. Raises LuceError.
        """
        if nodes[0].host is not None:
            return nodes[0].host
        assert self._full is not None
        pages = [node.page for node in nodes if node.page is not None]
        saved = self._save_pages(pages, held=True)
        if not saved.ready():
            for page in pages:
                self._full.add_reference(page)
            self._copying = saved, pages
            try:
                while self._copying is not None and not saved.ready():
                    yield saved
            finally:
                self._finish_copy()
        # While the budget allows, the copies stay: these pages can leave the devices later without another copy.
        unchanged = all(node.in_tree and node.host is None for node in nodes)
        if unchanged and self.bytes + saved.nbytes <= self.budget:
            for index, node in enumerate(nodes):
                self._set_host(node, (saved, index))
            self._reserve_host_memory()
        return saved, 0

    def evict_pages(self, count: int) -> None:
        """Remove pages of full attention from the devices until `count` are free. As many must be free or unused by
        sequences."""
        table = self._full
        assert table is not None
        while table.free < count:
            unused = [node for node in self.tree.nodes if node.page is not None and not table.referenced(node.page)]
            if len(unused) < count - table.free:
                with contextlib.suppress(LuceError):
                    self._finish_copy()
            victims = nsmallest(count - table.free, unused, key=lambda node: (node.last_used, -node.index))
            for node in victims:
                if node.host is not None:
                    self._remove_from_device(node)
            rest = sorted((n for n in victims if n.host is None), key=lambda node: (node.last_used, node.index))
            for begin in range(0, len(rest), BATCH):
                batch = [node for node in rest[begin : begin + BATCH] if node.in_tree]
                if batch and not self._move_to_host(batch):
                    self.clear()
                    break
        self._reserve_host_memory()

    def clear(self) -> None:
        """Remove all checkpoints."""
        while self.tree.checkpoints:
            self._evict(next(iter(self.tree.checkpoints)))
        self._reserve_host_memory()

    def _add(self, slot: int, ids: PrefixIds, *, interim: bool) -> Checkpoint:
        """A new checkpoint with the state of a slot. Raises LuceError."""
        residency = None if self._pager is None else self._pager.residency(slot, len(ids))
        state = self._backend.state.save(*self.state_place(slot, len(ids)))
        # A daemon that is lost meanwhile has no size to tell: nothing is in the tree yet.
        self.bytes += state.nbytes
        checkpoint = self.tree.add(ids, state, None, interim=interim)
        checkpoint.residency = residency
        return checkpoint

    def _share_host_page(self, node: PageNode, slot: int) -> None:
        """Use the copy in host memory that the pager has of a swapped-out page of a slot."""
        if node.host is None and node.page is None:
            assert self._pager is not None
            page = self._pager.host_page(slot, node.index)
            assert page is not None, "a sequence that has lost a page is not saved"
            self._set_host(node, page)

    def _save_pages(self, pages: list[int], *, held: bool = False) -> SavedState:
        return self._backend.state.save(None, self._tables.of_full(pages), held=held)

    def _finish_copy(self) -> None:
        """Wait for the copy in progress, and release its pages."""
        if self._copying is None:
            return
        assert self._full is not None
        saved, pages = self._copying
        self._copying = None
        try:
            saved.wait()
        finally:
            for page in pages:
                self._full.remove_reference(page)

    def _reserve_host_memory(self) -> None:
        """Let the backend prepare host memory for the pages that the next sequence may push off the devices, also those
        of sequences that still run: pinning memory takes so long that the sequence would mostly wait for it."""
        table = self._full
        if table is not None:
            device_only = self.device_only + table.total - table.free - self.pages
            pushed_off = table.max_pages(table.longest) - table.free
            in_budget = (self.budget - self.bytes) // max(1, self.page_bytes)
            self._backend.state.reserve(max(0, min(device_only, pushed_off, in_budget)))

    def _set_host(self, node: PageNode, page: HostPage) -> None:
        """A node's page is in host memory as well."""
        node.host = page
        self.bytes += self.page_bytes
        self.device_only -= node.page is not None

    def _remove_from_host(self, node: PageNode) -> None:
        """A node's page is not in host memory any more, if it was."""
        if node.host is not None:
            self.bytes -= self.page_bytes
            node.host = None
            self.device_only += node.page is not None

    def _remove_from_device(self, node: PageNode) -> None:
        assert self._full is not None and node.page is not None
        self._full.uncache(node.page)
        node.page = None
        self.pages -= 1
        self.device_only -= node.host is None

    def _move_to_host(self, nodes: list[PageNode]) -> bool:
        """Move the pages of nodes to host memory; nodes may be evicted to make room. False if the copy failed."""
        try:
            saved = self._save_pages([node.page for node in nodes if node.page is not None])
            self._make_room(saved.nbytes)
        except Exception as error:
            _log.warning("the prefix cache in memory is cleared: %s", error, exc_info=not isinstance(error, LuceError))
            return False
        for index, node in enumerate(nodes):
            if node.in_tree:
                self._set_host(node, (saved, index))
                self._remove_from_device(node)
        return True

    def _make_room(self, size: int) -> None:
        """Evict until `size` more bytes fit the budget: first copies of pages on the devices, then checkpoints."""
        if self.bytes + size <= self.budget:
            return
        copied = [node for node in self.tree.nodes if node.host is not None and node.page is not None]
        for node in sorted(copied, key=lambda node: node.last_used):
            if self.bytes + size > self.budget:
                self._remove_from_host(node)
        while self.bytes + size > self.budget and (victim := self.tree.eviction_candidate()) is not None:
            self._evict(victim)
            self.evictions += 1

    def _evict(self, checkpoint: Checkpoint) -> None:
        self.bytes -= checkpoint.nbytes
        for node in self.tree.remove(checkpoint):
            if node.page is not None:
                self._remove_from_device(node)
            self._remove_from_host(node)
