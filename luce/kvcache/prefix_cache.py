"""PrefixCache: what sequences computed, kept for those that begin alike.

The pages of full attention are shared where they are, in the devices' pools: a later sequence writes behind them only,
so nobody ever writes to a shared page. What cannot be shared is copied to the host when it is kept, and into the new
sequence's own slot and pages when it is used: recurrent states, the pages of windowed groups (the last window of them),
and the page that is not full yet.

What there is lies in memory (luce.kvcache.memory_tier); points that are worth it are written to the disk behind the
replies (luce.kvcache.saver), and come back from there. Everything here runs on the engine's thread, which is the one
that may call the backend.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce import log
from luce.backend.backend import Backend
from luce.draft.feature_tail import FeatureTail
from luce.errors import LuceError, ShardLostError
from luce.kvcache.disk.deadline import Deadline
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import keys, snapshot_id
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.reader import Reader, StoredTensor, by_layers
from luce.kvcache.disk.stats import CachedPrefix, DiskStats
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.memory_tier import BATCH, MemoryTier
from luce.kvcache.pools import PagePool, Place, Pools, Residence
from luce.kvcache.prefix_tree import Checkpoint, PageNode, Residency, Segment
from luce.kvcache.saver import Offer, Saver
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import Piece

_log = logging.getLogger(__name__)

# Tokens that the disk must know beyond what memory does.
_WORTH = 64


@dataclass(frozen=True)
class Hit:
    """Where a prompt is resumed: `length` positions are there, the last point among them is `point`.

    tier   "ram" or "disk", "none" if nothing was found
    logits  those behind the whole prompt, if they are known: then it need not be read for its reply to begin
    known  tokens of the prompt that lie in whole blocks of others, whether it could be resumed behind them or not
    """

    length: int
    point: Checkpoint | None
    tier: str
    known: int
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class _Found:
    """A place in memory to resume at."""

    length: int
    blocks: tuple[PageNode, ...]
    point: Checkpoint | None


@dataclass(frozen=True)
class CacheStats:
    """Numbers at one moment, with counters since the start."""

    #: host memory of the RAM tier, and its limit
    bytes: int = 0
    budget: int = 0
    checkpoints: int = 0
    #: pages on the devices
    pages: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reused_tokens: int = 0
    #: time to compute the reused tokens at the speed of the prompts so far, less the time to restore them
    seconds_saved: float = 0.0
    disk: DiskStats | None = None


class PrefixCache:
    """Over the pools of `backend`, one per page group.

    `budget` in bytes of host memory. Checkpoints of less than `least` tokens are not written to `disk`. `residence`: of
    sequences that may be longer than what they have on the devices.
    """

    def __init__(
        self,
        backend: Backend,
        pools: Sequence[PagePool],
        budget: int,
        disk: DiskTier | None = None,
        least: int = 0,
        residence: Residence | None = None,
    ) -> None:
        self._backend = backend
        self._pools = Pools(pools, recurrent=backend.capacity.recurrent)
        self._residence = residence
        self._hits = self._misses = self._tokens = 0
        #: prompts that were read: tokens, seconds
        self._read = (0, 0.0)
        self._seconds_saved = 0.0
        self.memory = MemoryTier(backend, self._pools, budget, residence)
        self.disk = disk
        self.saver = None if disk is None else Saver(self.memory, disk, least)
        #: whether a sequence can be resumed at points only, not behind any block
        self.exact = self._pools.exact

    def stats(self) -> CacheStats:
        """Numbers for people. Any thread may ask."""
        disk = None if self.disk is None else self.disk.current_stats()
        if disk is not None and self.saver is not None:
            disk.queued = self.saver.waiting
        return CacheStats(
            bytes=self.memory.bytes,
            budget=self.memory.budget,
            checkpoints=len(self.memory.tree.points),
            pages=self.memory.pages,
            hits=self._hits,
            misses=self._misses,
            evictions=self.memory.evictions,
            reused_tokens=self._tokens,
            seconds_saved=self._seconds_saved,
            disk=disk,
        )

    def resume(self, prompt: Int32, slot: int, most: int | None = None) -> Hit:
        """Put the longest prefix of a prompt that is known, of `most` tokens, into a slot that holds nothing yet.

        A whole prompt needs the logits of its last token, so it is resumed only at a point that has them.
        """
        started = time.monotonic()
        hit = self._resumed(prompt, slot, len(prompt) if most is None else most)
        took = time.monotonic() - started
        tokens, seconds = self._read
        if hit.length and tokens:
            self._seconds_saved += max(0.0, hit.length * seconds / tokens - took)
        if hit.length:
            facts = {"tier": hit.tier, "tokens": hit.length, "prompt": len(prompt), "seconds": round(took, 4)}
            log.event(_log, "prefix reused", logging.DEBUG, **facts)
        return hit

    def note_read(self, tokens: int, seconds: float) -> None:
        """Tokens of a prompt were computed in so many seconds."""
        self._read = self._read[0] + tokens, self._read[1] + seconds

    def _resumed(self, prompt: Int32, slot: int, most: int) -> Hit:
        found, known = self._find(prompt, most)
        for entry, length in self._stored(prompt, 0 if found is None else found.length + _WORTH, most):
            assert self.disk is not None
            # One of those before may have been the same, or have shown that the disk is slow.
            if entry.unusable or not self.disk.readable:
                continue
            loaded = self._load(prompt[:length], prompt[length:], entry, slot)
            if loaded is not None:
                point, logits = loaded
                return Hit(point.length, point, "disk", max(known, point.length // PAGE * PAGE), logits)
            # Pages were taken and given back: what was found may be gone.
            found, known = self._find(prompt, most)
        if found is None or not self._share(found, slot):
            self._misses += 1
            why = "nothing of it is kept"
            if found is not None:
                why = "it could not be restored"
            elif known:
                why = "pages of it are kept, but no state behind them"
            log.event(_log, "prefix not reused", logging.DEBUG, prompt=len(prompt), known=known, why=why)
            return Hit(0, None, "none", known)
        self._hits += 1
        self._tokens += found.length
        logits = None if found.point is None or found.length < len(prompt) else found.point.logits
        return Hit(found.length, found.point, "ram", known, logits)

    def keep(
        self,
        slot: int,
        ids: Int32,
        logits: NDArray[np.float32] | None = None,
        features: FeatureTail | None = None,
        *,
        passing: bool,
        after: Checkpoint | None = None,
        offer: Offer | None = None,
    ) -> Checkpoint | None:
        """Keep what a slot holds: the state after exactly `ids`. None if that failed.

        `after`: the point of the same sequence that this one follows; it becomes stale if it is a passing one. `offer`:
        as in `offer`, None if it is not worth writing to the disk. `features`: what a drafter reads of the last
        positions.
        """
        if self._residence is not None and not self._residence.whole(slot):
            return None
        try:
            point = self.memory.keep(slot, ids, logits, features, passing=passing)
        except LuceError as error:
            _log.warning("a prefix could not be kept: %s", error)
            return None
        point.passing &= passing
        point.stale = False
        if after is not None and after is not point:
            after.stale = after.passing
        if offer is not None:
            self.offer(point, offer)
        return point

    def offer(self, point: Checkpoint, offer: Offer) -> None:
        """A point is worth writing to the disk, if there is one."""
        if self.saver is not None:
            self.saver.offer(point, offer)

    def contents(self) -> list[CachedPrefix]:
        """What is kept, in memory and on the disk, what was of use last first."""
        points = sorted(self.memory.tree.points, key=lambda point: -point.used)
        found = []
        for point in points:
            ((length, key),) = keys(self.memory.tree.ids(point), [point.length])
            found.append(CachedPrefix(snapshot_id(key, length), "ram", length, point.nbytes))
        return found + ([] if self.disk is None else self.disk.contents())

    def forget(self) -> list[CachedPrefix]:
        """Give up all of it; returns what there was."""
        found = self.contents()
        if self.saver is not None:
            self.saver.forget()
        self.memory.clear()
        if self.disk is not None:
            self.disk.clear()
        return found

    def _find(self, prompt: Int32, most: int) -> tuple[_Found | None, int]:
        """Where in memory a prompt can be resumed, and how many of its first `most` tokens lie in whole blocks."""
        blocks, points = self.memory.tree.match(prompt[:most])
        usable = [p for p in points if p.length < len(prompt) or p.logits is not None]
        point = usable[-1] if usable else None
        length = 0 if point is None else point.length
        known = len(blocks) * PAGE
        free = min(known, (len(prompt) - 1) // PAGE * PAGE)
        if not self.exact and free > length:
            return _Found(free, tuple(blocks[: free // PAGE]), None), known
        if point is None:
            return None, known
        return _Found(length, tuple(blocks[: length // PAGE]), point), known

    def _stored(self, prompt: Int32, beyond: int, most: int) -> list[tuple[Snapshot, int]]:
        return [] if self.disk is None else self.disk.find(prompt, beyond, most, exact=self.exact)

    def _share(self, found: _Found, slot: int) -> bool:
        """Put what was found in memory into a slot. False, and the slot holds nothing, if that failed."""
        try:
            residency = None if found.point is None else found.point.residency
            away = self._away(found.length, residency)
            data = self._hold(found.blocks, found.length, slot, away)
            self._settle(slot, data, residency)
            if found.point is not None:
                self._backend.state.restore(*self._pools.state(slot, found.length), found.point.state)
                found.point.stale = False
        except LuceError as error:
            _log.warning("a cached prefix could not be restored: %s", error)
            self._let_go(slot)
            return False
        return True

    def _away(self, length: int, residency: Residency | None = None) -> frozenset[int]:
        """The pages of a sequence that are not to be on the devices."""
        if self._residence is None or self._pools.full is None:
            return frozenset()
        return frozenset(self._residence.absent(length, residency))

    def _settle(self, slot: int, data: dict[int, tuple[Segment, int]], residency: Residency | None = None) -> None:
        """A slot holds a sequence, of which these pages are in host memory."""
        if self._residence is not None:
            self._residence.resume(slot, data, residency)

    def _hold(
        self, blocks: Sequence[PageNode], length: int, slot: int, away: Collection[int]
    ) -> dict[int, tuple[Segment, int]]:
        """Let a slot hold the pages of `length` positions, with the contents of `blocks` in the first ones.

        But for those that are to be `away`: returns where these are in host memory.
        """
        # What is read below must not go when pages are taken for it.
        absent = [(i, block, block.data) for i, block in enumerate(blocks) if block.page is None and i not in away]
        data = self.memory.copies([(i, blocks[i]) for i in sorted(away) if i < len(blocks)])
        for pool in self._pools.groups:
            if pool is self._pools.full:
                pool.resume(slot, length, [block.page for block in blocks], away)
            else:
                pool.resume(slot, length, ())
        if self._pools.full is None:
            return data
        pages = self._pools.full.entries(slot, 0, len(blocks))
        for first, segment, at, count in _together(absent):
            self._backend.state.restore(*self._pools.only(pages[first : first + count]), segment.kept, at)
        for i, block, _ in absent:
            if block.alive:
                self.memory.place(block, pages[i])
        return data

    def _load(
        self, ids: Int32, behind: Int32, entry: Snapshot, slot: int
    ) -> tuple[Checkpoint, NDArray[np.float32] | None] | None:
        """Put a snapshot of `ids`, or its whole pages up to there, into a slot and into the tree.

        Returns the logits behind the prompt, which goes on with `behind`, if they are there. None, and the slot holds
        nothing, if that failed.
        """
        assert self.disk is not None
        started, length = time.monotonic(), len(ids)
        whole = length == entry.manifest.length
        patience = Deadline(length * self._read[1] / self._read[0]) if self._read[0] else Deadline()
        try:
            with contextlib.closing(self.disk.open(entry, patience)) as reader:
                tokens, residency = self.disk.read(
                    lambda: (reader.tokens(), reader.residency() if whole else None), patience
                )
                first = reader.manifest.first_page * PAGE
                if not np.array_equal(tokens if whole else tokens[: length - first], ids[first:]):
                    raise DamagedError("its tokens are others")
                blocks, _ = self.memory.tree.match(ids)
                away = self._away(length, residency)
                data = self._hold(blocks, length, slot, away)
                left = range(len(blocks), length // PAGE)
                there = [entry for entry in left if entry not in away]
                data |= self._passed(reader, slot, [entry for entry in left if entry in away], there, patience)
                self._fill(self._shares(reader, slot, there, length, state=whole), patience)
                self._settle(slot, data, residency)
                logits = features = opened = None
                if whole:
                    logits, features, opened = self.disk.read(
                        lambda: (reader.logits(), self._tail_of(reader), reader.prompt_end_logits(behind)), patience
                    )
                passing = entry.manifest.interim or not whole
                point = self.memory.keep(slot, ids, logits, features, passing=passing)
        except (LuceError, OSError) as error:
            self._let_go(slot)
            if isinstance(error, ShardLostError):
                _log.warning("snapshot %s: %s", entry.manifest.id, error)
            else:
                self.disk.record_failure(entry, error)
            return None
        self.disk.record_hit(entry, length, time.monotonic() - started)
        return point, opened if len(behind) else logits

    def _fill(self, shares: Iterator[tuple[dict[str, StoredTensor], tuple[Place, range]]], patience: Deadline) -> None:
        assert self.disk is not None
        decoded = self.disk.decode(shares, self._backend.state.staging_buffer, patience)
        with contextlib.closing(decoded):
            self._backend.state.load(Piece(*place, layers, tensors) for tensors, (place, layers) in decoded)

    def _passed(
        self, reader: Reader, slot: int, away: Sequence[int], there: Sequence[int], patience: Deadline
    ) -> dict[int, tuple[Segment, int]]:
        """Take pages that are to be `away` from a snapshot to host memory, by way of those of `there`, which a slot has
        still to fill."""
        data: dict[int, tuple[Segment, int]] = {}
        if not away:
            return data
        assert self._pools.full is not None and self.disk is not None
        ours = [self._pools.full.entries(slot, entry, entry + 1)[0] for entry in there[:BATCH]]
        for run in _side_by_side(away, len(ours)):
            shares = reader.pages(run.start, run.stop)
            places = (
                (part, (self._pools.only(ours[first - run.start :][:count]), layers))
                for first, count, share in shares
                for layers, part in by_layers(share, self.disk.layers)
            )
            self._fill(places, patience)
            segment = Segment(self._backend.state.save(*self._pools.only(ours[: len(run)])), len(run))
            data |= {entry: (segment, entry - run.start) for entry in run}
        return data

    def _shares(
        self, reader: Reader, slot: int, there: Sequence[int], length: int, *, state: bool
    ) -> Iterator[tuple[dict[str, StoredTensor], tuple[Place, range]]]:
        """What a snapshot has of some pages for a slot, and of its state if that is asked for; where that belongs, and
        of which layers."""
        assert self.disk is not None
        shards = self.disk.layers
        if self._pools.full is not None:
            pages = self._pools.full.entries(slot, 0, length // PAGE)
            for run in _side_by_side(there):
                for first, count, share in reader.pages(run.start, run.stop):
                    place = self._pools.only(pages[first : first + count])
                    yield from ((part, (place, layers)) for layers, part in by_layers(share, shards))
        if not state:
            return
        place = self._pools.state(slot, length)
        yield from ((part, (place, layers)) for layers, part in by_layers(reader.state(), shards))

    @staticmethod
    def _tail_of(reader: Reader) -> FeatureTail | None:
        """What a snapshot has for drafters; nothing depends on it but the pace."""
        try:
            return reader.features()
        except (DamagedError, OSError) as error:
            _log.warning("snapshot %s: drafting begins anew: %s", reader.manifest.id, error)
            return None

    def _let_go(self, slot: int) -> None:
        if self._residence is not None:
            self._residence.release(slot)
        for pool in self._pools.groups:
            pool.yield_all(slot)


def _side_by_side(entries: Sequence[int], most: int = sys.maxsize) -> Iterator[range]:
    """Ascending entries as ranges of up to `most`."""
    begin = 0
    for end in range(1, len(entries) + 1):
        if end == len(entries) or entries[end] != entries[end - 1] + 1 or end - begin == most:
            yield range(entries[begin], entries[end - 1] + 1)
            begin = end


def _together(
    absent: Sequence[tuple[int, PageNode, tuple[Segment, int] | None]],
) -> Iterator[tuple[int, Segment, int, int]]:
    """(first entry, segment, its first page, pages) of what lies side by side both in a sequence and in a segment."""
    begin = 0
    for end in range(1, len(absent) + 1):
        index, _, data = absent[end - 1]
        assert data is not None
        if end < len(absent) and absent[end][0] == index + 1 and absent[end][2] == (data[0], data[1] + 1):
            continue
        first, _, start = absent[begin]
        assert start is not None
        yield first, start[0], start[1], end - begin
        begin = end
