"""PrefixCache: what sequences computed, kept for those that begin alike.

The pages of full attention stay where they are, in the devices' pools: a later sequence shares them, and writes behind
them only, so nobody ever writes to a shared page. They take up no room of their own, as a sequence is promised pages
long before it takes them; when the pool runs dry, the pages that were of no use for longest move to host memory. What
cannot be shared is copied to the host when it is kept, and into the new sequence's own slot and pages when it is used:
recurrent states, the pages of windowed groups (the last window of them), and the page that is not full yet.

Host memory has a budget in bytes; when it is reached, the coldest points go, and their pages with them. Points that
are worth it are written to the disk behind the replies (luce.cache.disk), and come back from there.
Everything here runs on the engine's thread, which is the one that may call the backend.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.backend.kept import Kept, Piece
from luce.cache.disk import CachedPrefix, DiskStats, DiskTier, Save
from luce.cache.index import Entry
from luce.cache.manifest import keys, snapshot_id
from luce.cache.part import DamagedError
from luce.cache.reader import Reader, Share
from luce.cache.tree import Block, Point, Residency, Segment, Tree
from luce.draft.tails import Tail
from luce.errors import LuceError, ShardLostError
from luce.runtime.step import PAGE, Int32

_log = logging.getLogger(__name__)

# Pages that are copied to host memory together, and lie in one frame of a file.
_BATCH = 32
# Time between two pieces of work for the disk while sequences run, in times of what the first one took.
_PATIENCE = 100
# Bytes of host memory that are made ready at the start: what a snapshot of a large model passes through.
_READY = 768 << 20
# Points that may wait for the disk; the oldest is skipped.
_OFFERED = 16
# Tokens that the disk must know beyond what memory does.
_WORTH = 64


#: where a share of a snapshot belongs: slot, pages of each page group, layers
_Place = tuple[int | None, list[list[int]], range]
_ALL = range(sys.maxsize)


class Residence(Protocol):
    """Where the pages are that a long sequence has not on the devices. See luce.engine.residency.Pager."""

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


@dataclass(frozen=True)
class Hit:
    """Where a prompt is resumed: `length` positions are there, the last point among them is `point`.

    tier   "ram" or "disk", "none" if nothing was found
    known  tokens of the prompt that lie in whole blocks of others, whether it could be resumed behind them or not
    """

    length: int
    point: Point | None
    tier: str
    known: int


@dataclass(frozen=True)
class _Found:
    """A place in memory to resume at."""

    length: int
    blocks: tuple[Block, ...]
    point: Point | None


@dataclass(frozen=True)
class CacheStats:
    """Numbers at one moment; counters since the start. `bytes` of host memory, `pages` on the devices.

    `seconds_saved`: what reading the reused tokens would have taken at the speed of the prompts read until then, less
    what resuming took.
    """

    bytes: int = 0
    budget: int = 0
    points: int = 0
    pages: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    tokens: int = 0
    seconds_saved: float = 0.0
    disk: DiskStats | None = None


class PrefixCache:
    """Over the pools of `backend`, one per page group.

    `budget` in bytes of host memory. Points of less than `least` tokens are not written to `disk`. `residence`: of
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
        self._pools = tuple(pools)
        self._residence = residence
        self._full = next((i for i, pool in enumerate(pools) if pool.window is None), None)
        self._budget = budget
        self._bytes = self._pages = 0
        self._hits = self._misses = self._evictions = self._tokens = 0
        #: prompts that were read: tokens, seconds
        self._read = (0, 0.0)
        self._seconds_saved = 0.0
        self.tree = Tree()
        self.disk = disk
        self._least = least
        self._offered: deque[Point] = deque()
        self._export: Iterator[Kept | None] | None = None
        self._awaited: Kept | None = None
        self._saving: Save | None = None
        #: pages that are held while they are copied, and the copy
        self._copying: tuple[Kept, list[int]] | None = None
        #: when `pump` goes on, on time.monotonic's clock
        self._next = 0.0
        #: whether a sequence can be resumed at points only, not behind any block
        self.exact = backend.recurrent or any(pool.window is not None for pool in pools)
        threading.Thread(target=self._prepare, name="luce-cache-memory", daemon=True).start()

    def _prepare(self) -> None:
        """Let memory that copies are fast with be there before the first prompt; pinning takes long."""
        with contextlib.suppress(LuceError):
            self._backend.landing(min(self._budget, _READY))

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
            seconds_saved=self._seconds_saved,
            disk=None if self.disk is None else self.disk.snapshot_stats(),
        )

    def resume(self, prompt: Int32, slot: int) -> Hit:
        """Put the longest prefix of a prompt that is known into a slot that holds nothing yet.

        A whole prompt needs the logits of its last token, so it is resumed only at a point that has them.
        """
        started = time.monotonic()
        hit = self._resumed(prompt, slot)
        tokens, seconds = self._read
        if hit.length and tokens:
            self._seconds_saved += max(0.0, hit.length * seconds / tokens - (time.monotonic() - started))
        return hit

    def note_read(self, tokens: int, seconds: float) -> None:
        """Tokens of a prompt were computed in so many seconds."""
        self._read = self._read[0] + tokens, self._read[1] + seconds

    def _resumed(self, prompt: Int32, slot: int) -> Hit:
        found, known = self._find(prompt)
        for entry in self._stored(prompt, 0 if found is None else found.length + _WORTH):
            point = self._load(prompt, entry, slot)
            if point is not None:
                return Hit(point.length, point, "disk", max(known, point.length // PAGE * PAGE))
            # Pages were taken and given back: what was found may be gone.
            found, known = self._find(prompt)
        if found is None or not self._share(found, slot):
            self._misses += 1
            return Hit(0, None, "none", known)
        self._hits += 1
        self._tokens += found.length
        return Hit(found.length, found.point, "ram", known)

    def keep(
        self,
        slot: int,
        ids: Int32,
        logits: NDArray[np.float32] | None = None,
        features: Tail | None = None,
        *,
        passing: bool,
        after: Point | None = None,
        save: bool = True,
    ) -> Point | None:
        """Keep what a slot holds: the state after exactly `ids`. None if that failed.

        `after`: the point of the same sequence that this one follows; it becomes stale if it is a passing one. `save`:
        whether it is worth writing to the disk. `features`: what a drafter reads of the last positions.
        """
        if self._residence is not None and not self._residence.whole(slot):
            return None
        try:
            point = self.tree.find(ids) or self._add(slot, ids, passing=passing)
        except LuceError as error:
            _log.warning("a prefix could not be kept: %s", error)
            return None
        self._admit(point, slot, logits, features)
        point.passing &= passing
        point.stale = False
        if after is not None and after is not point:
            after.stale = after.passing
        if save and self.disk is not None and point.length >= self._least:
            self._offered.append(point)
            if len(self._offered) > _OFFERED:
                self._offered.popleft()
                self.disk.stats.skipped += 1
        return point

    def contents(self) -> list[CachedPrefix]:
        """What is kept, in memory and on the disk, what was of use last first."""
        points = sorted(self.tree.points, key=lambda point: -point.used)
        found = []
        for point in points:
            ((length, key),) = keys(self.tree.ids(point), [point.length])
            found.append(CachedPrefix(snapshot_id(key, length), "ram", length, point.nbytes))
        return found + ([] if self.disk is None else self.disk.contents())

    def forget(self) -> list[CachedPrefix]:
        """Give up all of it; returns what there was."""
        found = self.contents()
        self._offered.clear()
        self.clear()
        if self.disk is not None:
            self.disk.forget()
        return found

    @property
    def pending(self) -> bool:
        """Whether `pump` has something to do now."""
        if self.disk is None or not self.disk.room:
            return False
        # The next point continues the one before, once that is on the disk.
        return self._export is not None or (bool(self._offered) and (self._saving is None or self._saving.over))

    @property
    def busy(self) -> bool:
        """Whether something is to be written, or is being written. Any thread may ask."""
        return bool(self._export or self._offered) or (self.disk is not None and self.disk.busy)

    def pump(self, *, idle: bool) -> None:
        """A bounded piece of work for the disk, if there is some and the disk has room.

        `idle`: whether nobody waits for the engine. Otherwise there is time in between, so that it takes no more than a
        share of _PATIENCE of the engine's thread.
        """
        started = time.monotonic()
        if not self.pending or not (idle or started >= self._next):
            return
        if self._export is None:
            self._export = self._exported(self._offered.popleft())
        try:
            if idle and self._awaited is not None:
                self._awaited.wait()
            self._awaited = next(self._export)
        except StopIteration:
            self._export = self._awaited = None
        except LuceError as error:
            _log.warning("a prefix could not be saved: %s", error)
            self._export = self._awaited = None
        now = time.monotonic()
        self._next = now + _PATIENCE * (now - started)

    def flush(self, seconds: float) -> None:
        """Write what waits to be written, for so long at most, and stop writing."""
        if self.disk is None:
            return
        end = time.monotonic() + seconds
        while (self._export or self._offered) and time.monotonic() < end and self.disk.works:
            self.pump(idle=True)
            if not self.pending:
                time.sleep(0.002)
        self.disk.close(max(0.0, end - time.monotonic()))

    def reclaim(self, count: int) -> None:
        """Give up pages of full attention until `count` are free. There must be as many free or idle ones."""
        assert self._full is not None
        pool = self._pools[self._full]
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
            for begin in range(0, len(lacking), _BATCH):
                batch = [block for block in lacking[begin : begin + _BATCH] if block.alive]
                if batch and not self._spill(batch):
                    self.clear()
                    break

    def clear(self) -> None:
        """Forget everything."""
        while self.tree.points:
            self._evict(next(iter(self.tree.points)))

    # What follows moves data.

    def _find(self, prompt: Int32) -> tuple[_Found | None, int]:
        """Where in memory a prompt can be resumed, and how many of its tokens lie in whole blocks."""
        blocks, points = self.tree.match(prompt)
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

    def _stored(self, prompt: Int32, beyond: int) -> list[Entry]:
        return [] if self.disk is None else self.disk.find(prompt, beyond)

    def _share(self, found: _Found, slot: int) -> bool:
        """Put what was found in memory into a slot. False, and the slot holds nothing, if that failed."""
        try:
            residency = None if found.point is None else found.point.residency
            away = self._away(found.length, residency)
            data = self._hold(found.blocks, found.length, slot, away)
            self._settle(slot, data, residency)
            if found.point is not None:
                pages = self._state_pages(slot, found.length)
                self._backend.restore(self._state_slot(slot), pages, found.point.state)
                found.point.stale = False
        except LuceError as error:
            _log.warning("a cached prefix could not be restored: %s", error)
            self._let_go(slot)
            return False
        return True

    def _away(self, length: int, residency: Residency | None = None) -> frozenset[int]:
        """The pages of a sequence that are not to be on the devices."""
        if self._residence is None or self._full is None:
            return frozenset()
        return frozenset(self._residence.absent(length, residency))

    def _settle(self, slot: int, data: dict[int, tuple[Segment, int]], residency: Residency | None = None) -> None:
        """A slot holds a sequence, of which these pages are in host memory."""
        if self._residence is not None:
            self._residence.resume(slot, data, residency)

    def _hold(
        self, blocks: Sequence[Block], length: int, slot: int, away: Collection[int]
    ) -> dict[int, tuple[Segment, int]]:
        """Let a slot hold the pages of `length` positions, with the contents of `blocks` in the first ones.

        But for those that are to be `away`: returns where these are in host memory.
        """
        # What is read below must not go when pages are taken for it.
        absent = [(i, block, block.data) for i, block in enumerate(blocks) if block.page is None and i not in away]
        data = self._on_host_now([(i, blocks[i]) for i in sorted(away) if i < len(blocks)])
        for group, pool in enumerate(self._pools):
            if group == self._full:
                pool.resume(slot, length, [block.page for block in blocks], away)
            else:
                pool.resume(slot, length, ())
        if self._full is None:
            return data
        pages = self._pools[self._full].entries(slot, 0, len(blocks))
        for first, segment, at, count in _together(absent):
            self._backend.restore(None, self._only(pages[first : first + count]), segment.kept, at)
        for i, block, _ in absent:
            if block.alive:
                self._place(block, pages[i])
        return data

    def _on_host_now(self, blocks: Sequence[tuple[int, Block]]) -> dict[int, tuple[Segment, int]]:
        """Where the contents of blocks are in host memory, into which they are copied if they are not there yet."""
        data = {index: block.data for index, block in blocks if block.data is not None}
        lacking = [(index, block.page) for index, block in blocks if block.data is None and block.page is not None]
        for begin in range(0, len(lacking), _BATCH):
            batch = lacking[begin : begin + _BATCH]
            segment = Segment(self._backend.save(None, self._only([page for _, page in batch])), len(batch))
            data |= {index: (segment, at) for at, (index, _) in enumerate(batch)}
        return data

    def _load(self, prompt: Int32, entry: Entry, slot: int) -> Point | None:
        """Put a snapshot into a slot and into the tree. None, and the slot holds nothing, if that failed."""
        assert self.disk is not None
        started, length = time.monotonic(), entry.manifest.length
        ids = prompt[:length]
        try:
            with contextlib.closing(self.disk.open(entry)) as reader:
                if not np.array_equal(reader.tokens(), ids[reader.manifest.first * PAGE :]):
                    raise DamagedError("its tokens are others")
                blocks, _ = self.tree.match(ids)
                residency = reader.residency()
                away = self._away(length, residency)
                data = self._hold(blocks, length, slot, away)
                left = range(len(blocks), length // PAGE)
                there = [entry for entry in left if entry not in away]
                data |= self._passed(reader, slot, [entry for entry in left if entry in away], there)
                self._fill(self._shares(reader, slot, there, length))
                self._settle(slot, data, residency)
                logits, features = reader.logits(), self._tail_of(reader)
                point = self.tree.find(ids) or self._add(slot, ids, passing=entry.manifest.passing)
        except (LuceError, OSError) as error:
            self._let_go(slot)
            if isinstance(error, ShardLostError):
                _log.warning("snapshot %s: %s", entry.manifest.id, error)
            else:
                self.disk.failed(entry, error)
            return None
        self._admit(point, slot, logits, features)
        self.disk.loaded(entry, time.monotonic() - started)
        return point

    def _fill(self, shares: Iterator[tuple[Share, _Place]]) -> None:
        assert self.disk is not None
        decoded = self.disk.decoded(shares, self._backend.landing)
        with contextlib.closing(decoded):
            self._backend.fill(Piece(*place, tensors) for tensors, place in decoded)

    def _passed(
        self, reader: Reader, slot: int, away: Sequence[int], there: Sequence[int]
    ) -> dict[int, tuple[Segment, int]]:
        """Take pages that are to be `away` from a snapshot to host memory, by way of those of `there`, which a slot has
        still to fill."""
        data: dict[int, tuple[Segment, int]] = {}
        if not away:
            return data
        assert self._full is not None
        ours = [self._pools[self._full].entries(slot, entry, entry + 1)[0] for entry in there[:_BATCH]]
        for run in _side_by_side(away, len(ours)):
            shares = reader.pages(run.start, run.stop)
            self._fill(
                (share, (None, self._only(ours[first - run.start :][:count]), _ALL)) for first, count, share in shares
            )
            segment = Segment(self._backend.save(None, self._only(ours[: len(run)])), len(run))
            data |= {entry: (segment, entry - run.start) for entry in run}
        return data

    def _shares(self, reader: Reader, slot: int, there: Sequence[int], length: int) -> Iterator[tuple[Share, _Place]]:
        """What a snapshot has of some pages for a slot, and of its state, and where that belongs."""
        if self._full is not None:
            pages = self._pools[self._full].entries(slot, 0, length // PAGE)
            for run in _side_by_side(there):
                for first, count, share in reader.pages(run.start, run.stop):
                    yield share, (None, self._only(pages[first : first + count]), _ALL)
        for layers, share in reader.states():
            yield share, (self._state_slot(slot), self._state_pages(slot, length), layers)

    def _add(self, slot: int, ids: Int32, *, passing: bool) -> Point:
        """A new point with the state of a slot. Raises LuceError."""
        state = self._backend.save(self._state_slot(slot), self._state_pages(slot, len(ids)))
        self._bytes += state.nbytes
        point = self.tree.add(ids, state, None, passing=passing)
        if self._residence is not None:
            point.residency = self._residence.snapshot(slot, len(ids))
        return point

    @staticmethod
    def _tail_of(reader: Reader) -> Tail | None:
        """What a snapshot has for drafters; nothing depends on it but the pace."""
        try:
            return reader.features()
        except (DamagedError, OSError) as error:
            _log.warning("snapshot %s: drafting begins anew: %s", reader.manifest.id, error)
            return None

    def _admit(self, point: Point, slot: int, logits: NDArray[np.float32] | None, features: Tail | None) -> None:
        """Give a point the pages that a slot holds, and logits and features if it has none; make room for it."""
        if point.logits is None and logits is not None:
            point.logits = logits
            self._bytes += logits.nbytes
        if point.features is None and features is not None:
            point.features = features
            self._bytes += features.nbytes
        if self._full is not None:
            trail = self.tree.trail(point)
            for block, page in zip(trail, self._pools[self._full].entries(slot, 0, len(trail)), strict=True):
                if page < 0:
                    self._borrow(block, slot)
                elif block.page is None:
                    self._place(block, page)
        self._make_room(0)

    def _borrow(self, block: Block, slot: int) -> None:
        """A block is in host memory only, where the sequence in a slot has it."""
        if block.data is None and block.page is None:
            assert self._residence is not None
            block.data = self._residence.data(slot, block.index)
            assert block.data is not None, "a sequence of which a page is lost is not kept"
            self._bytes += block.data[0].page_bytes

    def _exported(self, point: Point) -> Iterator[Kept | None]:
        """Copies a point's pages to host memory and hands it to the disk, a bounded piece each turn.

        Gives what it waits for, if anything. Raises LuceError.
        """
        assert self.disk is not None
        ids = self.tree.ids(point)
        missing = self.disk.missing(ids) if point in self.tree.points else None
        if missing is None:
            return
        parent, first = missing
        trail = self.tree.trail(point)[first:] if self._full is not None else []
        save: Save | None = None
        complete = False
        try:
            while trail:
                run = _alike(trail)
                if not all(block.alive for block in run):
                    return
                kept, at = yield from self._on_host(run)
                if save is None:
                    raw = kept.nbytes // len(run) * len(trail) + point.nbytes
                    save = self._saving = self.disk.save(ids, parent, first, raw, passing=point.passing)
                for tensors in kept.windows(at, len(run)):
                    save.pages(run[0].index, tensors)
                    yield None
                trail = trail[len(run) :]
            if save is None:
                save = self._saving = self.disk.save(ids, parent, first, point.nbytes, passing=point.passing)
            for tensors in point.state.windows():
                save.state(tensors)
                yield None
            if point.residency is not None:
                save.residency(point.residency)
            for tail in () if point.features is None else point.features.windows():
                save.features(tail)
                yield None
            save.finish(point.logits)
            complete = True
        finally:
            if save is not None and not complete:
                save.abort()

    def _on_host(self, blocks: Sequence[Block]) -> Generator[Kept, None, tuple[Kept, int]]:
        """Where blocks that are alike lie in host memory, and which page is the first."""
        if blocks[0].data is not None:
            segment, at = blocks[0].data
            return segment.kept, at
        assert self._full is not None
        pages = [block.page for block in blocks if block.page is not None]
        kept = self._backend.save(None, self._only(pages), held=True)
        if not kept.ready():
            for page in pages:
                self._pools[self._full].share(page)
            self._copying = kept, pages
            while self._copying is not None and not kept.ready():
                yield kept
            self._landed()
        self._copied(blocks, kept)
        return kept, 0

    def _landed(self) -> None:
        """Wait for pages that are copied, and do not hold them any longer."""
        if self._copying is None:
            return
        assert self._full is not None
        kept, pages = self._copying
        self._copying = None
        try:
            kept.wait()
        finally:
            for page in pages:
                self._pools[self._full].give(page)

    def _copied(self, blocks: Sequence[Block], kept: Kept) -> None:
        """Blocks are in host memory as well: as long as there is room, they need not be copied again to leave it to
        others on the devices."""
        free = all(block.alive and block.data is None for block in blocks)
        if free and self._bytes + kept.nbytes <= self._budget:
            segment = Segment(kept, len(blocks))
            self._bytes += segment.page_bytes * len(blocks)
            for index, block in enumerate(blocks):
                block.data = segment, index

    def _let_go(self, slot: int) -> None:
        if self._residence is not None:
            self._residence.release(slot)
        for pool in self._pools:
            pool.yield_all(slot)

    def _state_slot(self, slot: int) -> int | None:
        return slot if self._backend.recurrent else None

    def _state_pages(self, slot: int, length: int) -> list[list[int]]:
        """The pages of each group that belong to a point's state."""
        end, whole = -(-length // PAGE), length // PAGE
        return [
            pool.entries(slot, whole if pool.window is None else pool.seen_from(length), end) for pool in self._pools
        ]

    def _only(self, pages: list[int]) -> list[list[int]]:
        """Pages of full attention, and none of the other groups."""
        return [pages if i == self._full else [] for i in range(len(self._pools))]

    def _spill(self, blocks: list[Block]) -> bool:
        """Move blocks to host memory, or give them up if there can be no room for them. False if the copy failed."""
        assert self._full is not None
        try:
            kept = self._backend.save(None, self._only([b.page for b in blocks if b.page is not None]))
            segment = Segment(kept, len(blocks))
            self._make_room(kept.nbytes)
        except LuceError as error:
            _log.warning("the prefix cache is dropped: %s", error)
            return False
        for index, block in enumerate(blocks):
            if block.alive:
                block.data = segment, index
                self._bytes += segment.page_bytes
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
        twice = [block for block in self.tree.blocks if block.data is not None and block.page is not None]
        for block in sorted(twice, key=lambda block: block.used):
            if self._bytes + size > self._budget and block.data is not None:
                self._bytes -= block.data[0].page_bytes
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
                self._bytes -= block.data[0].page_bytes
                block.data = None


def _alike(blocks: Sequence[Block]) -> Sequence[Block]:
    """The first blocks that lie alike: on the devices only, or side by side in host memory. _BATCH at most."""
    first = blocks[0]
    for count, block in enumerate(blocks[:_BATCH]):
        same = block.data is None if first.data is None else block.data == (first.data[0], first.data[1] + count)
        if not same:
            return blocks[:count]
    return blocks[:_BATCH]


def _side_by_side(entries: Sequence[int], most: int = sys.maxsize) -> Iterator[range]:
    """Ascending entries as ranges of up to `most`."""
    begin = 0
    for end in range(1, len(entries) + 1):
        if end == len(entries) or entries[end] != entries[end - 1] + 1 or end - begin == most:
            yield range(entries[begin], entries[end - 1] + 1)
            begin = end


def _together(
    absent: Sequence[tuple[int, Block, tuple[Segment, int] | None]],
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
