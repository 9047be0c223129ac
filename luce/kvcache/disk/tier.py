"""The disk behind the prefix cache: a thread that writes snapshots, and reading them ahead of the devices.

The engine's thread hands over a few pages at a time, only while little waits to be written, so that neither memory nor
any token's time goes to saving. Whatever the disk does, serving goes on: what cannot be written is skipped, what cannot
be read is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from luce import log
from luce.draft.feature_tail import FeatureTail
from luce.errors import LuceError
from luce.kvcache.disk.deadline import Deadline, SlowError
from luce.kvcache.disk.fingerprint import Fingerprint, describe, described
from luce.kvcache.disk.index import Entry
from luce.kvcache.disk.manifest import Manifest, Recall
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.reader import Reader, Share, verify
from luce.kvcache.disk.store import GoneError, Store, StoreFullError
from luce.kvcache.disk.switch_interval import turns
from luce.kvcache.disk.threads import Threads
from luce.kvcache.disk.writer import Writer
from luce.kvcache.prefix_tree import Residency
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import Tensors

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: pieces that may wait to be written
_WAITING = 2
#: bytes of shares that are decoded ahead of the devices, and of memory that their tensors have together
_AHEAD, _TOGETHER = 192 << 20, 16 << 20
#: where each of their tensors begins
_ALIGNED = 256
#: threads that decode while a sequence waits
_WORKERS = min(16, os.cpu_count() or 1)
#: after so many failures in a row, nothing is written for a while
_FAILURES, _PAUSE_SECONDS = 3, 60.0
_WARN_SECONDS = 60.0
#: how long the first request waits for the directory, which is read at the start
_PATIENCE = 5.0
#: what the piece of work that is under way gets when all ends
_LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class UnusedSnapshots:
    """Snapshots of the same weights that this model cannot use."""

    model: str
    snapshots: int
    bytes: int
    #: the settings that differ
    reason: str


@dataclass
class DiskStats:
    """Counters since the start, with numbers of one moment."""

    #: bytes below the directory, and their limit
    bytes: int = 0
    budget: int = 0
    snapshots: int = 0
    #: snapshots that are being written or wait for it
    queued: int = 0
    hits: int = 0
    reused_tokens: int = 0
    saves: int = 0
    #: snapshots not written because too many were queued, or because another server removed what they continue
    skipped: int = 0
    failures: int = 0
    evictions: int = 0
    quarantines: int = 0
    #: snapshots that were found and could not be restored: their bytes are not what was written
    damaged: int = 0
    #: the same: the disk reported an error
    unreadable: int = 0
    #: the same: the disk took too long
    slow: int = 0
    #: the same: they do not fit this model, or memory was short
    refused: int = 0
    #: bytes of snapshots on the disk, and before compression
    written_bytes: int = 0
    raw_bytes: int = 0
    #: work of the writing thread
    save_seconds: float = 0.0
    #: time that sequences waited for snapshots
    load_seconds: float = 0.0
    #: found at the start
    unused: tuple[UnusedSnapshots, ...] = ()


@dataclass(frozen=True)
class CachedPrefix:
    """A checkpoint as /v1/cache lists it."""

    id: str
    #: "ram" or "disk"
    tier: str
    tokens: int
    bytes: int
    #: seconds since the snapshot was made and since it was last used; None in memory, where only the order is known
    age: float | None = None
    idle: float | None = None
    #: why a snapshot on the disk is not used, "" if it is
    unusable: str = ""


class DiskTier:
    """Snapshots of one model under `directory`.

    identify  says which model it is; may take long, so it is called on the writing thread
    known     whether it takes no time; a request then waits for the directory
    layers    of each shard: a file for each
    """

    def __init__(
        self,
        directory: Path,
        *,
        budget: int,
        identify: Callable[[], Fingerprint],
        known: bool,
        layers: Sequence[range],
    ) -> None:
        self.directory = directory
        self.stats = DiskStats(budget=budget)
        #: called after each piece of work that the writing thread has done
        self.wake: Callable[[], object] = lambda: None
        self._layers = tuple(layers)
        self._identify = identify
        self._known = known
        self._budget = budget
        self._store: Store | None = None
        self._opened = threading.Event()
        self._begun = time.monotonic()
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._waiting = 0
        self._count = threading.Lock()
        self._row = 0
        self._paused = self._warned = 0.0
        #: until when nothing is read, as the disk is slow
        self._unread = 0.0
        self._unfinished: Save | None = None
        self._workers = Threads(_WORKERS, "luce-cache-read")
        self._thread = threading.Thread(target=self._main, name="luce-cache-write", daemon=True)
        self._thread.start()

    @property
    def store(self) -> Store | None:
        """The directory; None until it is read, and if it cannot be."""
        return self._store

    def wait_opened(self, seconds: float) -> None:
        """Until the directory is read, or cannot be; for so long at most."""
        self._opened.wait(seconds)

    @property
    def read_from(self) -> bool:
        """Whether it is quick enough to be read from now."""
        return time.monotonic() >= self._unread

    @property
    def works(self) -> bool:
        """Whether something can be written, now or soon."""
        return self._read() is not None and time.monotonic() >= self._paused

    @property
    def room(self) -> bool:
        """Whether another piece may be handed over now."""
        return self._store is not None and self._waiting < _WAITING and time.monotonic() >= self._paused

    @property
    def busy(self) -> bool:
        """Whether what was handed over is not all written yet."""
        return self._waiting > 0

    def snapshot_stats(self) -> DiskStats:
        """The counters, with the state of now. Any thread may ask."""
        store = self._store
        if store is not None:
            self.stats.bytes, self.stats.snapshots = store.nbytes, len(store.entries)
            self.stats.evictions, self.stats.quarantines = store.evictions, store.quarantines
        return self.stats

    def contents(self) -> list[CachedPrefix]:
        """The snapshots of this model that can be resumed, what was of use last first."""
        store, now = self._store, time.time()
        entries = [] if store is None else [e for e in store.entries if e.manifest.model == store.model]
        return [
            CachedPrefix(
                id=entry.manifest.id,
                tier="disk",
                tokens=entry.manifest.length,
                bytes=entry.manifest.nbytes,
                age=now - entry.manifest.created,
                idle=now - entry.used,
                unusable=entry.unusable,
            )
            for entry in sorted(entries, key=lambda entry: -entry.used)
            if entry.manifest.point
        ]

    def forget(self) -> None:
        """Give up all snapshots of this model, behind what is being written."""

        def clear() -> None:
            store = self._store
            if store is None:
                return
            try:
                store.clear(store.model)
            except OSError as error:
                _log.warning("snapshots could not be removed, and are not used until the next start: %s", error)
                for entry in store.entries:
                    entry.unusable = "it could not be removed"

        self._post(clear)

    def close(self, seconds: float) -> None:
        """Write what was handed over, for so long at most, and stop."""
        # Finding out which model it is may take minutes.
        nothing = not self.busy and not self._opened.is_set()
        self._post(None)
        self._thread.join(0.0 if nothing else seconds + _LEAST_SECONDS)
        self._workers.close(_LEAST_SECONDS)

    def recall(self, digest: str) -> list[int] | None:
        """The ids of a text that some reply had, None if there is none. Any thread may ask; reads a file."""
        store = self._read()
        if store is None or not self.read_from or store.said(digest) is None:
            return None
        try:
            return self.within(Deadline(), lambda: store.recall(digest))
        except SlowError as error:
            self._shun("a reply's tokens are those of its text", error)
            return None

    def _read(self) -> Store | None:
        """The directory, for which those who come first wait a little."""
        if self._known and not self._opened.is_set():
            self._opened.wait(max(0.0, self._begun + _PATIENCE - time.monotonic()))
        return self._store

    # --- for the engine's thread: reading

    def find(self, ids: Int32, beyond: int, most: int, *, exact: bool) -> list[tuple[Entry, int]]:
        """Snapshots of prefixes of `ids` of more than `beyond` tokens and `most` of them, longest first, with their
        lengths. Unless it is to be `exact`, a snapshot is one of each whole page in it, too."""
        store = self._read()
        if store is None or not self.read_from:
            return []
        found = [(entry, entry.manifest.length) for entry in store.find(ids, beyond, most)]
        if not exact and (part := store.longest(ids, beyond, most)) is not None:
            found.append(part)
        return sorted(found, key=lambda one: -one[1])

    def open(self, entry: Entry, patience: Deadline) -> Reader:
        """Opens a snapshot. Raises DamagedError, OSError, SlowError."""
        assert self._store is not None
        opened = self._workers.submit(self._store.reader, entry)
        try:
            return patience.wait(opened)
        except SlowError:
            opened.add_done_callback(_close)
            raise

    def within(self, patience: Deadline, task: Callable[[], T]) -> T:
        """What a task that reads gives. Raises what it raises, and SlowError."""
        return patience.wait(self._workers.submit(task))

    def decoded(
        self, shares: Iterable[tuple[Share, T]], memory: Callable[[int], NDArray[np.uint8]], patience: Deadline
    ) -> Generator[tuple[Tensors, T]]:
        """The tensors of shares, each with what came with it, decoded ahead side by side. Raises DamagedError, OSError,
        SlowError.

        They lie in what `memory` gives for so many bytes.
        """
        with turns:
            yield from self._decoded(shares, memory, patience)

    def _decoded(
        self, shares: Iterable[tuple[Share, T]], memory: Callable[[int], NDArray[np.uint8]], patience: Deadline
    ) -> Generator[tuple[Tensors, T]]:
        ahead: deque[tuple[dict[str, Future[NDArray[np.generic]]], T]] = deque()
        sizes: deque[int] = deque()

        def first() -> tuple[Tensors, T]:
            futures, with_it = ahead[0]
            tensors = {name: patience.wait(future) for name, future in futures.items()}
            ahead.popleft()
            sizes.popleft()
            return tensors, with_it

        try:
            for share, with_it in shares:
                size = sum(rows.nbytes for rows in share.values())
                while ahead and sum(sizes) + size > _AHEAD:
                    yield first()
                ahead.append((self._begin(share, memory), with_it))
                sizes.append(size)
            while ahead:
                yield first()
        finally:
            for futures, _ in ahead:
                for future in futures.values():
                    future.cancel()

    def _begin(
        self, share: Share, memory: Callable[[int], NDArray[np.uint8]]
    ) -> dict[str, Future[NDArray[np.generic]]]:
        # Memory that is fast to copy from comes in slabs: pieces of a slab are there before they are asked for.
        room, futures = np.empty(0, np.uint8), {}
        sizes = {name: -(-rows.nbytes // _ALIGNED) * _ALIGNED for name, rows in share.items()}
        left = sum(sizes.values())
        for name, rows in share.items():
            if sizes[name] > len(room):
                room = memory(max(min(left, _TOGETHER), sizes[name]))
            futures[name] = self._workers.submit(rows.read, room[: rows.nbytes])
            room = room[sizes[name] :]
            left -= sizes[name]
        return futures

    def loaded(self, entry: Entry, tokens: int, seconds: float) -> None:
        """So many tokens of a snapshot were of use."""
        self.stats.hits += 1
        self.stats.reused_tokens += tokens
        self.stats.load_seconds += seconds
        assert self._store is not None
        store = self._store
        self._post(lambda: store.touch(entry))

    def failed(self, entry: Entry, error: Exception) -> None:
        """A snapshot could not be read or restored: it is left alone, and looked at behind the scenes."""
        if isinstance(error, SlowError):
            self.stats.slow += 1
            self._shun(f"snapshot {entry.manifest.id} is not used", error)
            return
        # It may be that another server has changed it: whether there is something to warn of is found out then.
        level = logging.INFO if isinstance(error, DamagedError | FileNotFoundError) else logging.WARNING
        _log.log(level, "snapshot %s is not used: %s", entry.manifest.id, error)
        entry.unusable = str(error)
        if isinstance(error, DamagedError):
            self.stats.damaged += 1
        elif isinstance(error, OSError):
            self.stats.unreadable += 1
        else:
            self.stats.refused += 1
        if isinstance(error, DamagedError | OSError):
            self._post(lambda: self._check(entry, error))

    def _shun(self, what: str, error: SlowError) -> None:
        """Read nothing for a while."""
        self._unread = time.monotonic() + _PAUSE_SECONDS
        advice = "nothing is read from it for a minute; --kv-cache-dir names another directory, or off"
        _log.warning("%s: %s; %s", what, error, advice)

    # --- for the engine's thread: writing

    def missing(self, ids: Int32) -> tuple[Entry | None, int] | None:
        """See Store.missing. A snapshot that is there was of use."""
        assert self._store is not None
        store, missing = self._store, self._store.missing(ids)

        def touch() -> None:
            if (entry := store.at(ids)) is not None:
                store.touch(entry)

        if missing is None:
            self._post(touch)
        return missing

    def save(self, ids: Int32, parent: Entry | None, first: int, raw: int, *, passing: bool) -> Save:
        """Begin to write a snapshot of about `raw` bytes."""
        return Save(self, ids, parent, first, raw, passing)

    # --- for Save

    def post(self, task: Callable[[], object], save: Save) -> None:
        """Let the writing thread do a piece of a snapshot; a failure ends the snapshot."""

        def run() -> None:
            if save.over:
                return
            self._unfinished = save
            started = time.monotonic()
            try:
                task()
                self.stats.save_seconds += time.monotonic() - started
            except Exception as error:
                save.end()
                self._fail(error)

        self._post(run)

    def written(self, manifest: Manifest, seconds: float) -> None:
        """A snapshot is complete, so long after its first piece was handed over."""
        self.stats.saves += 1
        self.stats.raw_bytes += manifest.raw
        self.stats.written_bytes += manifest.nbytes
        facts = {"snapshot": manifest.id, "tokens": manifest.length, "new": manifest.length - manifest.first * PAGE}
        log.event(_log, "snapshot written", logging.DEBUG, **facts, bytes=manifest.nbytes, seconds=round(seconds, 4))
        self._row = 0
        self._unfinished = None

    def writer(self, ids: Int32, parent: Entry | None, first: int, raw: int, *, passing: bool) -> Writer:
        """See Store.writer."""
        assert self._store is not None
        self._store.rescan()
        return self._store.writer(ids, parent, first, raw, passing=passing)

    @property
    def layers(self) -> tuple[range, ...]:
        """Of each shard."""
        return self._layers

    # --- the writing thread

    def _post(self, task: Callable[[], object] | None) -> None:
        with self._count:
            self._waiting += 1
        self._tasks.put(task)

    def _main(self) -> None:
        try:
            fingerprint = self._identify()
            store = Store(self.directory, fingerprint.model, self._budget)
            self._look_around(store, fingerprint)
            self._store = store
        except Exception as error:
            advice = "--kv-cache-dir names another directory, or off"
            known = isinstance(error, OSError | LuceError)
            _log.warning("prompts are not kept across restarts: %s (%s)", error, advice, exc_info=not known)
        self._opened.set()
        self.wake()
        self._work()
        if self._unfinished is not None:
            self._unfinished.end()

    def _look_around(self, store: Store, fingerprint: Fingerprint) -> None:
        """Keep to the budget, which may be another one than last time, and say what is there that is not used."""
        with contextlib.suppress(StoreFullError, OSError):
            store.make_room(0)
        with contextlib.suppress(OSError):
            describe(store.root / store.model, fingerprint)
        found: dict[str, list[Entry]] = {}
        for entry in store.entries:
            if entry.manifest.model != store.model and entry.manifest.point:
                found.setdefault(entry.manifest.model, []).append(entry)
        others = []
        for model, entries in sorted(found.items()):
            other = described(store.root / model)
            if other is not None and other.contents == fingerprint.contents:
                reason = fingerprint.differences(other)
                others.append(
                    UnusedSnapshots(model, len(entries), sum(entry.manifest.nbytes for entry in entries), reason)
                )
                _log.info("%d snapshots of this model are not used: %s", len(entries), reason)
        self.stats.unused = tuple(others)
        if any(self.directory.glob("*.dkv")) or any(self.directory.glob("*/*.dkv")):
            _log.info("%s holds .dkv files of another server, which are not read", self.directory)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                self._fail(error)
            with self._count:
                self._waiting -= 1
            self.wake()

    def _check(self, entry: Entry, error: Exception) -> None:
        """Find out which part of a snapshot that could not be read is damaged, if any."""
        store = self._store
        assert store is not None
        try:
            changed = False
            for part in store.chain(entry):
                try:
                    verify(part)
                except DamagedError as found:
                    if not store.changed(part):
                        store.quarantine(part, found)
                        return
                    store.reread(part)
                    changed = True
            if isinstance(error, DamagedError) and not changed:
                _log.warning("snapshot %s is not used, though all of it can be read: %s", entry.manifest.id, error)
        except (DamagedError, OSError):
            # Changed or removed by another server, or a disk that cannot be read now.
            store.rescan()
            chain = [entry]
            with contextlib.suppress(DamagedError):
                chain = store.chain(entry)
            for part in chain:
                store.reread(part)
        entry.unusable = ""

    def _fail(self, error: Exception) -> None:
        if isinstance(error, GoneError):
            self.stats.skipped += 1
            _log.info("a snapshot was not written: %s", error)
            return
        self.stats.failures += 1
        self._row += 1
        if self._row >= _FAILURES:
            self._row, self._paused = 0, time.monotonic() + _PAUSE_SECONDS
        if not isinstance(error, OSError | LuceError):
            _log.error("a snapshot could not be written", exc_info=error)
        elif time.monotonic() >= self._warned:
            self._warned = time.monotonic() + _WARN_SECONDS
            advice = (
                "raise --kv-cache-budget or free space" if isinstance(error, StoreFullError) else "look at the disk"
            )
            _log.warning("a snapshot was not written: %s; %s, or name another --kv-cache-dir", error, advice)


def _close(opened: Future[Reader]) -> None:
    """Nobody waits for it any longer."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


class Save:
    """One snapshot that is being written. Methods only hand over; what was handed over must not change."""

    def __init__(self, tier: DiskTier, ids: Int32, parent: Entry | None, first: int, raw: int, passing: bool) -> None:
        self._tier = tier
        self._writer: Writer | None = None
        self._begun = time.monotonic()
        #: whether it is written, failed or given up
        self.over = False

        def begin() -> None:
            self._writer = tier.writer(ids, parent, first, raw, passing=passing)

        tier.post(begin, self)

    def pages(self, first: int, tensors: Tensors) -> None:
        """Whole pages from number `first` on."""

        def write() -> None:
            assert self._writer is not None
            self._writer.pages(first, tensors, self._tier.layers)

        self._tier.post(write, self)

    def state(self, tensors: Tensors) -> None:
        """Some of what the point has beside pages."""

        def write() -> None:
            assert self._writer is not None
            self._writer.state(tensors, self._tier.layers)

        self._tier.post(write, self)

    def features(self, tail: FeatureTail) -> None:
        """Some of what drafters read of the last positions, oldest first."""

        def write() -> None:
            assert self._writer is not None
            self._writer.features(tail)

        self._tier.post(write, self)

    def residency(self, residency: Residency) -> None:
        """Which pages are to be on the devices."""

        def write() -> None:
            assert self._writer is not None
            self._writer.residency(residency)

        self._tier.post(write, self)

    def opening(self, ids: Sequence[int], logits: NDArray[np.float32]) -> None:
        """As in Writer."""

        def write() -> None:
            assert self._writer is not None
            self._writer.opening(ids, logits)

        self._tier.post(write, self)

    def finish(self, logits: NDArray[np.float32] | None, recall: Recall | None) -> None:
        """Everything is handed over but the logits of the last token, and what the reply's texts are."""

        def write() -> None:
            assert self._writer is not None
            manifest = self._writer.finish(logits, recall).manifest
            self.over = True
            self._tier.written(manifest, time.monotonic() - self._begun)

        self._tier.post(write, self)

    def abort(self) -> None:
        """Give up."""
        self._tier.post(self.end, self)

    def end(self) -> None:
        """On the writing thread: nothing of it stays."""
        self.over = True
        if self._writer is not None:
            self._writer.abort()
