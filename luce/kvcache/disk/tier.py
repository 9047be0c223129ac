"""The disk tier of the prefix cache. Whatever the disk does, serving goes on.

The engine's thread hands over a few pages at a time, and only while little waits to be written: saving takes neither
much memory nor time from any token. A snapshot that cannot be written is skipped; one that cannot be read is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from luce import log
from luce.errors import LuceError
from luce.kvcache.disk.deadline import Deadline, SlowDiskError
from luce.kvcache.disk.expansion import SnapshotLimits
from luce.kvcache.disk.files import make_directory, open_directory
from luce.kvcache.disk.fingerprint import Fingerprint, read_about, write_about
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.read_ahead import ReadAhead
from luce.kvcache.disk.reader import Reader
from luce.kvcache.disk.stats import CachedPrefix, DiskStats, UnusedSnapshots
from luce.kvcache.disk.store import Store, StoreFullError
from luce.kvcache.disk.write_thread import LEAST_SECONDS, WriteThread
from luce.kvcache.disk.writer import NewSnapshot, Writer
from luce.kvcache.prefix_ids import PrefixIds
from luce.runtime.step import PAGE

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: tasks that may wait for the writing thread
_WAITING = 2
#: nothing is read for this long after the disk was too slow
_PAUSE_SECONDS = 60.0
#: the first requests wait this long for the directory, which is scanned at the start
_OPENING_SECONDS = 5.0


class DiskTier:
    """The snapshots of one model under `directory`.

    budget    bytes of everything below the directory, 0 for no limit
    identify  returns the model's fingerprint; may take minutes, so the writing thread calls it
    known     whether `identify` takes no time: then requests wait for the directory
    layers    of each shard: a snapshot has one file for each
    limits    of the model: a snapshot that expands to more is damaged; None: nothing is too large
    """

    def __init__(
        self,
        directory: Path,
        *,
        budget: int,
        identify: Callable[[], Fingerprint],
        known: bool,
        layers: Sequence[range],
        limits: SnapshotLimits | None = None,
    ) -> None:
        self.directory = directory
        self.stats = DiskStats(budget=budget)
        #: called after each task of the writing thread
        self.wake: Callable[[], object] = lambda: None
        self.layers = tuple(layers)
        #: time.monotonic() until which nothing is read, as the disk was too slow
        self.reads_paused_until = 0.0
        self._identify = identify
        self._known = known
        self._budget = budget
        self._limits = limits
        self._store: Store | None = None
        self._opened = threading.Event()
        self._started = time.monotonic()
        self._closed = False
        #: the last snapshot that was begun
        self._writer: Writer | None = None
        #: decodes tensors of snapshots ahead of the devices
        self.read_ahead = ReadAhead()
        self._writing = WriteThread(self.stats, self._open_store, lambda: self.wake(), self._discard_unfinished)
        self._writing.start()

    @property
    def store(self) -> Store | None:
        """The snapshots; None until the directory is scanned, and if it cannot be."""
        return self._store

    def wait_opened(self, seconds: float) -> None:
        """Wait up to `seconds` until the directory is scanned or has failed."""
        self._opened.wait(seconds)

    @property
    def readable(self) -> bool:
        """Whether the disk is fast enough to be read now."""
        return time.monotonic() >= self.reads_paused_until

    @property
    def writable(self) -> bool:
        """Whether snapshots can be written, now or soon."""
        return self._scanned() is not None and not self._writing.paused

    @property
    def accepts(self) -> bool:
        """Whether the writing thread accepts another task now."""
        return self._store is not None and self._writing.waiting < _WAITING and not self._writing.paused

    @property
    def waiting(self) -> int:
        """Tasks of the writing thread that have not finished."""
        return self._writing.waiting

    def current_stats(self) -> DiskStats:
        """The counters, with the numbers of this moment. Thread-safe."""
        store = self._store
        if store is not None:
            self.stats.bytes, self.stats.snapshots = store.nbytes, len(store.snapshots)
            self.stats.evictions, self.stats.quarantines = store.evictions, store.quarantines
        return self.stats

    def contents(self) -> list[CachedPrefix]:
        """The resumable snapshots of this model, most recently used first."""
        store, now = self._store, time.time()
        snapshots = [] if store is None else [s for s in store.snapshots if s.manifest.model == store.model]
        return [
            CachedPrefix(
                id=snapshot.manifest.id,
                tier="disk",
                tokens=snapshot.manifest.length,
                bytes=snapshot.manifest.nbytes,
                age=now - snapshot.manifest.created,
                idle=now - snapshot.last_used,
                unusable=snapshot.unusable,
            )
            for snapshot in sorted(snapshots, key=lambda snapshot: -snapshot.last_used)
            if snapshot.manifest.resumable
        ]

    def clear(self) -> None:
        """Remove all snapshots of this model, behind the tasks of the writing thread."""

        def clear() -> None:
            store = self._store
            if store is None:
                return
            try:
                store.clear(store.model)
            except OSError as error:
                _log.warning("snapshots could not be removed and stay unused until the next start: %s", error)
                for snapshot in store.snapshots:
                    snapshot.unusable = "could not be removed"

        self._writing.post(clear)

    def close(self, seconds: float) -> None:
        """Stop; wait up to `seconds` for the tasks of the writing thread."""
        self._closed = True
        # Identifying the model may take minutes: it is not waited for if there is nothing to write.
        idle = not self.waiting and not self._opened.is_set()
        self._writing.close(0.0 if idle else seconds + LEAST_SECONDS)
        self.read_ahead.close(LEAST_SECONDS)

    def reply_tokens(self, digest: str) -> list[int] | None:
        """The tokens of a reply's text, None if no snapshot has them. Thread-safe; reads a file."""
        store = self._scanned()
        if store is None or not self.readable or store.with_reply(digest) is None:
            return None
        try:
            return self.read_ahead.run(lambda: store.reply_tokens(digest), Deadline())
        except SlowDiskError as error:
            self._pause_reads("the text of a reply is tokenized again", error)
            return None

    # --- for the engine's thread: reading

    def find(self, ids: PrefixIds, longer_than: int, limit: int, *, exact: bool) -> list[tuple[Snapshot, int]]:
        """Snapshots that have a prefix of `ids` of more than `longer_than` tokens and at most `limit`, with the length,
        longest first. Unless `exact`, the whole pages of a snapshot count, too, not only all of its tokens."""
        store = self._scanned()
        if store is None or not self.readable:
            return []
        found = [(snapshot, snapshot.manifest.length) for snapshot in store.find(ids, longer_than, limit)]
        if not exact and (prefix := store.longest_prefix(ids, longer_than, limit)) is not None:
            found.append(prefix)
        return sorted(found, key=lambda one: -one[1])

    def open(self, snapshot: Snapshot, deadline: Deadline) -> Reader:
        """Open a snapshot. Raises DamagedError, OSError or SlowDiskError."""
        assert self._store is not None
        return self.read_ahead.open(self._store, snapshot, deadline)

    def record_hit(self, snapshot: Snapshot, tokens: int, seconds: float) -> None:
        """Count `tokens` of a snapshot as restored."""
        self.stats.hits += 1
        self.stats.reused_tokens += tokens
        self.stats.load_seconds += seconds
        assert self._store is not None
        store = self._store
        self._writing.post(lambda: store.mark_used(snapshot))

    def record_failure(self, snapshot: Snapshot, error: Exception) -> None:
        """Stop using a snapshot that could not be read or restored, and examine it on the writing thread."""
        if isinstance(error, SlowDiskError):
            self.stats.slow += 1
            self._pause_reads(f"snapshot {snapshot.manifest.id} is not used", error)
            return
        # Another server may have changed it: the examination finds out whether to warn.
        level = logging.INFO if isinstance(error, DamagedError | FileNotFoundError) else logging.WARNING
        _log.log(level, "snapshot %s is not used: %s", snapshot.manifest.id, error)
        snapshot.unusable = str(error)
        if isinstance(error, DamagedError):
            self.stats.damaged += 1
        elif isinstance(error, OSError):
            self.stats.unreadable += 1
        else:
            self.stats.refused += 1
        if isinstance(error, DamagedError | OSError):
            self._writing.post(lambda: self._examine(snapshot, error))

    # --- for the engine's thread: writing

    def missing(self, ids: PrefixIds) -> tuple[Snapshot | None, int] | None:
        """See Store.missing. If there is a snapshot already, it counts as used."""
        assert self._store is not None
        store, missing = self._store, self._store.missing(ids)

        def mark_used() -> None:
            if (snapshot := store.exact(ids)) is not None:
                store.mark_used(snapshot)

        if missing is None:
            self._writing.post(mark_used)
        return missing

    def write(self, new: NewSnapshot) -> Writer:
        """Begin to write a snapshot, on the writing thread."""
        assert self._store is not None
        self._writer = Writer(self._store, new, self.layers, self._run_timed, self._record_written)
        return self._writer

    def _run_timed(self, task: Callable[[], None]) -> None:
        def run() -> None:
            started = time.monotonic()
            task()
            self.stats.save_seconds += time.monotonic() - started

        self._writing.post(run)

    # --- on the writing thread

    def _record_written(self, writer: Writer) -> None:
        assert writer.snapshot is not None
        manifest = writer.snapshot.manifest
        self.stats.saves += 1
        self.stats.raw_bytes += manifest.raw_bytes
        self.stats.written_bytes += manifest.nbytes
        log.event(
            _log,
            "snapshot written",
            logging.DEBUG,
            snapshot=manifest.id,
            tokens=manifest.length,
            new=manifest.length - manifest.first_page * PAGE,
            bytes=manifest.nbytes,
            seconds=round(time.monotonic() - writer.started, 4),
        )
        self._writing.succeeded()

    def _discard_unfinished(self) -> None:
        if self._writer is not None and not self._writer.over:
            self._writer.discard()

    def _open_store(self) -> None:
        try:
            make_directory(self.directory)
            # A directory that is refused is so before the model's files are read.
            open_directory(self.directory).close()
            fingerprint = self._identify()
            store = Store(self.directory, fingerprint.model, self._budget, self._limits)
            self._inspect(store, fingerprint)
            self._store = store
        except Exception as error:
            advice = "--kv-cache-dir names another directory, or off"
            known = isinstance(error, OSError | LuceError)
            # The model's file is closed soon after the tier, also where `identify` still reads it.
            if not self._closed:
                _log.warning("prompts are not cached across restarts: %s (%s)", error, advice, exc_info=not known)
        self._opened.set()
        self.wake()

    def _inspect(self, store: Store, fingerprint: Fingerprint) -> None:
        """Enforce the budget, which may have changed since the last start, and report the snapshots that are unused."""
        with contextlib.suppress(StoreFullError, OSError):
            store.make_room(0)
        with contextlib.suppress(OSError), open_directory(self.directory, LAYOUT, store.model) as own:
            write_about(own, fingerprint)
        found: dict[str, list[Snapshot]] = {}
        for snapshot in store.snapshots:
            if snapshot.manifest.model != store.model and snapshot.manifest.resumable:
                found.setdefault(snapshot.manifest.model, []).append(snapshot)
        unused = []
        for model, snapshots in sorted(found.items()):
            with open_directory(self.directory, LAYOUT, model) as directory:
                other = read_about(directory)
            if other is not None and other.contents == fingerprint.contents:
                reason = fingerprint.differences(other)
                nbytes = sum(snapshot.manifest.nbytes for snapshot in snapshots)
                unused.append(UnusedSnapshots(model, len(snapshots), nbytes, reason))
                _log.info("%d snapshots of this model are not used: %s", len(snapshots), reason)
        self.stats.unused = tuple(unused)
        if store.holds(".dkv"):
            _log.info("%s holds .dkv files of another server, which are not read", self.directory)

    def _examine(self, snapshot: Snapshot, error: Exception) -> None:
        """Find the damaged one among a snapshot and those that it continues, if there is one, and quarantine it."""
        store = self._store
        assert store is not None
        try:
            changed = False
            for part in store.chain(snapshot):
                try:
                    store.verify(part)
                except DamagedError as found:
                    if not store.changed(part):
                        store.quarantine(part, found)
                        return
                    store.reload(part)
                    changed = True
            if isinstance(error, DamagedError) and not changed:
                _log.warning("snapshot %s is not used, though all of it is readable: %s", snapshot.manifest.id, error)
        except (DamagedError, OSError):
            # Another server changed or removed it, or the disk cannot be read now.
            store.rescan()
            chain = [snapshot]
            with contextlib.suppress(DamagedError):
                chain = store.chain(snapshot)
            for part in chain:
                store.reload(part)
        snapshot.unusable = ""

    # --- for any thread

    def _scanned(self) -> Store | None:
        """The snapshots. The first requests wait a little until the directory is scanned."""
        if self._known and not self._opened.is_set():
            self._opened.wait(max(0.0, self._started + _OPENING_SECONDS - time.monotonic()))
        return self._store

    def _pause_reads(self, effect: str, error: SlowDiskError) -> None:
        self.reads_paused_until = time.monotonic() + _PAUSE_SECONDS
        advice = "nothing is read from it for a minute; --kv-cache-dir names another directory, or off"
        _log.warning("%s: %s; %s", effect, error, advice)
