"""Restoring a prefix into the slot of a sequence: from memory, or from a snapshot on the disk."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.draft.feature_tail import FeatureTail
from luce.errors import LuceError, ShardLostError
from luce.kvcache.disk.deadline import Deadline
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.reader import Reader, StoredTensor, by_layers
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.memory_tier import BATCH, MemoryTier
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import Pager
from luce.kvcache.prefix_ids import PrefixIds
from luce.kvcache.prefix_tree import Checkpoint, HostPage, PageNode, Residency
from luce.runtime.step import PAGE
from luce.shard.saved_state import StatePiece

_log = logging.getLogger(__name__)

#: a slot or None, and pages of each page group: as Backend.state takes them
_Place = tuple[int | None, list[list[int]]]
#: stored tensors, and where they belong: the place and the layers
_Stored = tuple[dict[str, StoredTensor], tuple[_Place, range]]


class Restorer:
    """Fills empty slots. A failure is logged, and the slot is empty again."""

    def __init__(self, backend: Backend, tables: PageTables, memory: MemoryTier, pager: Pager | None) -> None:
        self._backend = backend
        self._tables = tables
        self._full = tables.full
        self._memory = memory
        self._pager = pager

    def from_memory(self, slot: int, length: int, nodes: Sequence[PageNode], checkpoint: Checkpoint | None) -> bool:
        """Restore `length` tokens: the pages of `nodes`, and the state of a checkpoint. False if it failed."""
        try:
            residency = None if checkpoint is None else checkpoint.residency
            host = self._hold(slot, length, nodes, self._swapped_out(length, residency))
            self._resume_paging(slot, host, residency)
            if checkpoint is not None:
                self._backend.state.restore(*self._memory.state_place(slot, length), checkpoint.state)
                checkpoint.superseded = False
        except Exception as error:
            known = isinstance(error, LuceError)
            _log.warning("a cached prefix could not be restored: %s", error, exc_info=not known)
            self._empty(slot)
            if not known:
                # What is wrong with it would be wrong for the next sequence as well.
                self._memory.clear()
            return False
        return True

    def from_disk(
        self, disk: DiskTier, slot: int, prompt: PrefixIds, length: int, snapshot: Snapshot, deadline: Deadline
    ) -> tuple[Checkpoint, NDArray[np.float32] | None] | None:
        """Restore the first `length` tokens of a prompt: a whole snapshot, or whole pages of it. Saves a checkpoint in
        memory.

        Returns the checkpoint, and the logits of the prompt's end if they are stored. None if it failed.
        """
        ids, rest = prompt[:length], prompt[length:]
        started = time.monotonic()
        whole = length == snapshot.manifest.length
        try:
            with contextlib.closing(disk.open(snapshot, deadline)) as reader:
                tokens, residency = disk.read_ahead.run(
                    lambda: (reader.tokens(), reader.residency() if whole else None), deadline
                )
                first = reader.manifest.first_page * PAGE
                if not np.array_equal(tokens if whole else tokens[: length - first], ids[first:]):
                    raise DamagedError("its tokens differ from the prompt's")
                nodes, _ = self._memory.tree.match(ids)
                swapped_out = self._swapped_out(length, residency)
                host = self._hold(slot, length, nodes, swapped_out)
                missing = range(len(nodes), length // PAGE)
                entries = [entry for entry in missing if entry not in swapped_out]
                to_host = [entry for entry in missing if entry in swapped_out]
                host |= self._load_to_host(disk, reader, slot, to_host, entries, deadline)
                self._load(disk, self._stored(disk, reader, slot, entries, length, state=whole), deadline)
                self._resume_paging(slot, host, residency)
                logits = features = prompt_end = None
                if whole:
                    logits, features, prompt_end = disk.read_ahead.run(
                        lambda: (reader.logits(), _features(reader), reader.prompt_end_logits(rest)), deadline
                    )
                interim = snapshot.manifest.interim or not whole
                checkpoint = self._memory.save(slot, ids, logits, features, interim=interim)
        except Exception as error:
            self._empty(slot)
            known = isinstance(error, LuceError | OSError)
            if not known or isinstance(error, ShardLostError):
                _log.warning("snapshot %s could not be restored: %s", snapshot.manifest.id, error, exc_info=not known)
            if not isinstance(error, ShardLostError):
                disk.record_failure(snapshot, error)
            return None
        disk.record_hit(snapshot, length, time.monotonic() - started)
        return checkpoint, prompt_end if len(rest) else logits

    def _swapped_out(self, length: int, residency: Residency | None) -> frozenset[int]:
        """The entries of a sequence that are swapped out when it resumes."""
        if self._pager is None or self._full is None:
            return frozenset()
        return frozenset(self._pager.swapped_out(length, residency))

    def _resume_paging(self, slot: int, host: dict[int, HostPage], residency: Residency | None) -> None:
        """Hand the swapped-out pages of a sequence to the pager."""
        if self._pager is not None:
            self._pager.resume(slot, host, residency)

    def _hold(
        self, slot: int, length: int, nodes: Sequence[PageNode], swapped_out: Collection[int]
    ) -> dict[int, HostPage]:
        """Let a slot hold the pages of `length` positions, the first ones with the contents of `nodes`.

        Returns where the `swapped_out` entries among `nodes` lie in host memory.
        """
        # References to host pages that must survive the eviction of their nodes when the slot takes pages.
        from_host = [
            (i, node, node.host)
            for i, node in enumerate(nodes)
            if node.page is None and node.host is not None and i not in swapped_out
        ]
        host = self._memory.host_pages([(i, nodes[i]) for i in sorted(swapped_out) if i < len(nodes)])
        for table in self._tables.groups:
            if table is self._full:
                table.resume(slot, length, [node.page for node in nodes], swapped_out)
            else:
                table.resume(slot, length)
        if self._full is None:
            return host
        pages = self._full.entries(slot, 0, len(nodes))
        for first, (saved, index), count in _consecutive(from_host):
            self._backend.state.restore(None, self._tables.of_full(pages[first : first + count]), saved, index)
        for i, node, _ in from_host:
            if node.in_tree:
                self._memory.place(node, pages[i])
        return host

    def _load(self, disk: DiskTier, stored: Iterator[_Stored], deadline: Deadline) -> None:
        decoded = disk.read_ahead.decode(stored, self._backend.state.staging_buffer, deadline)
        with contextlib.closing(decoded):
            self._backend.state.load(StatePiece(*place, layers, tensors) for tensors, (place, layers) in decoded)

    def _load_to_host(
        self,
        disk: DiskTier,
        reader: Reader,
        slot: int,
        swapped_out: Sequence[int],
        entries: Sequence[int],
        deadline: Deadline,
    ) -> dict[int, HostPage]:
        """Load pages of a snapshot to host memory, by way of the slot's pages of `entries`, which are still empty."""
        host: dict[int, HostPage] = {}
        if not swapped_out:
            return host
        assert self._full is not None
        pages = [self._full.entries(slot, entry, entry + 1)[0] for entry in entries[:BATCH]]
        for run in _ranges(swapped_out, len(pages)):
            stored = (
                (part, ((None, self._tables.of_full(pages[first - run.start :][:count])), layers))
                for first, count, tensors in reader.pages(run.start, run.stop)
                for layers, part in by_layers(tensors, disk.layers)
            )
            self._load(disk, stored, deadline)
            saved = self._backend.state.save(None, self._tables.of_full(pages[: len(run)]))
            host |= {entry: (saved, entry - run.start) for entry in run}
        return host

    def _stored(
        self, disk: DiskTier, reader: Reader, slot: int, entries: Sequence[int], length: int, *, state: bool
    ) -> Iterator[_Stored]:
        """The tensors of a snapshot for some entries of a slot, and for its state if asked for."""
        place: _Place
        if self._full is not None:
            pages = self._full.entries(slot, 0, length // PAGE)
            for run in _ranges(entries):
                for first, count, tensors in reader.pages(run.start, run.stop):
                    place = None, self._tables.of_full(pages[first : first + count])
                    yield from ((part, (place, layers)) for layers, part in by_layers(tensors, disk.layers))
        if state:
            place = self._memory.state_place(slot, length)
            yield from ((part, (place, layers)) for layers, part in by_layers(reader.state(), disk.layers))

    def _empty(self, slot: int) -> None:
        if self._pager is not None:
            self._pager.release(slot)
        self._tables.clear(slot)


def _features(reader: Reader) -> FeatureTail | None:
    """The features of a snapshot. Only the speed of drafting depends on them, so a failure is no error."""
    try:
        return reader.features()
    except (DamagedError, OSError) as error:
        _log.warning("snapshot %s: drafting begins with an empty context: %s", reader.manifest.id, error)
        return None


def _ranges(entries: Sequence[int], most: int = sys.maxsize) -> Iterator[range]:
    """Ascending entries as ranges of at most `most`."""
    begin = 0
    for end in range(1, len(entries) + 1):
        if end == len(entries) or entries[end] != entries[end - 1] + 1 or end - begin == most:
            yield range(entries[begin], entries[end - 1] + 1)
            begin = end


def _consecutive(pages: Sequence[tuple[int, PageNode, HostPage]]) -> Iterator[tuple[int, HostPage, int]]:
    """(first entry, its host page, number of pages) of pages that are consecutive both as entries and in host
    memory."""
    begin = 0
    for end in range(1, len(pages) + 1):
        entry, _, (saved, index) = pages[end - 1]
        if end < len(pages) and pages[end][0] == entry + 1 and pages[end][2] == (saved, index + 1):
            continue
        first, _, host = pages[begin]
        yield first, host, end - begin
        begin = end
