"""A directory of snapshots: adding, finding and evicting them, in an order of disk operations that survives a crash.

A snapshot is written in a directory of its own under tmp/ and renamed when all of it is on the disk, the manifest last.
A crash leaves either a whole snapshot or garbage, which the next start removes. A snapshot that is deleted is renamed
first, so a reader with open files finishes. Several servers may share a directory: names are content hashes, a rename
either happens or does not, and only the holder of the lock evicts.

Lookups never wait for the disk: one lock guards the index, another one serialises writers.
"""

from __future__ import annotations

import contextlib
import logging
import stat
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from luce.errors import LuceError
from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.directory import Directory
from luce.kvcache.disk.expansion import SnapshotLimits
from luce.kvcache.disk.files import IrregularFileError, OpenDirectory
from luce.kvcache.disk.index import Index, Snapshot
from luce.kvcache.disk.manifest import LAYOUT, MANIFEST, MOST_BYTES, Manifest, is_snapshot_id
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.reader import Reader, read_tokens, verify
from luce.kvcache.prefix_ids import PrefixIds, tokens_of
from luce.runtime.step import PAGE

_log = logging.getLogger(__name__)

#: the snapshots of models unused for this long are evicted before all others
_UNUSED_SECONDS = 30 * 86400.0
#: directories that are no snapshots, of which a scan reports each; of the others it reports the number
_REPORTED = 5
#: files that a manifest does not name may be about to be named while they are younger than this
UNNAMED_SECONDS = 60.0


class StoreFullError(LuceError):
    """The budget or the disk has no space for a snapshot, and eviction cannot free enough."""


class SnapshotGoneError(LuceError):
    """Another server removed what a snapshot continues while it was written. The next one is written whole."""


class Store(Index):
    """The snapshots below `root`. Thread-safe. Raises OSError if the directory cannot be created, and
    UnsafeDirectoryError if it is not this user's alone.

    `budget`: bytes of everything below `root`, 0 for no limit. `limits` of the model, None if it is not loaded.
    """

    def __init__(self, root: Path, model: str, budget: int, limits: SnapshotLimits | None = None) -> None:
        super().__init__(model)
        self._directory = Directory(root, model)
        #: for people
        self.root = root / LAYOUT
        self.budget = budget
        self.limits = limits
        self._writers = threading.RLock()
        #: by model, the directory's time of change at the last look
        self._seen: dict[str, int] = {}
        #: directories that were reported as unreadable
        self._unreadable: set[tuple[str, str]] = set()
        #: bytes that this process has written to tmp/
        self._writing = 0
        #: stored bytes per raw byte, averaged over the snapshots so far
        self.compression = 1.0
        self.evictions = self.quarantines = 0
        self.rescan()
        self.tidy()
        if names := self._directory.outdated:
            mib = self._directory.outdated_bytes / 2**20
            _log.info("%s of an earlier version (%.1f MiB) is not read, and makes room first", ", ".join(names), mib)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots, also unfinished and damaged ones, and of earlier formats."""
        with self._lock:
            stored = sum(snapshot.manifest.nbytes for snapshot in self._snapshots.values())
            return self._writing + self._directory.trash_bytes + stored + self._directory.outdated_bytes

    def rescan(self) -> None:
        """Update the index with the snapshots that other processes wrote or removed."""
        with self._writers:
            models = self._directory.models()
            for snapshot in self.snapshots:
                if snapshot.manifest.model not in models:
                    self._forget(snapshot)
            for model in models:
                try:
                    with self._directory.open(model) as directory:
                        self._rescan(model, directory)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._report_unreadable(model, "", error)
            self._relink()

    def mark_used(self, snapshot: Snapshot) -> None:
        """Note that a snapshot is used now, and so are those that it continues: with equal times it is evicted before
        them."""
        now = time.time()
        # Another server may have removed some of them.
        with contextlib.suppress(DamagedError):
            for part in self.chain(snapshot):
                part.last_used = now
                with contextlib.suppress(OSError), part.open() as directory:
                    directory.touch(MANIFEST, now)

    # --- reading

    def open(self, snapshot: Snapshot) -> Reader:
        """Read the indexes of a snapshot's files. Raises DamagedError or OSError."""
        return Reader(self.chain(snapshot), self.limits)

    def verify(self, snapshot: Snapshot) -> None:
        """Read all bytes that a snapshot stores itself. Raises DamagedError or OSError."""
        verify(snapshot, self.limits)

    def tokens(self, snapshot: Snapshot, begin: int = 0) -> PrefixIds:
        """The tokens of a snapshot from number `begin` on: [length - begin]. Raises DamagedError or OSError."""
        found: list[PrefixIds] = [np.empty(0, np.int32)]
        chain = self.chain(snapshot)
        for part, after in zip(chain, [*chain[1:], None], strict=True):
            first = part.manifest.first_page * PAGE
            end = part.manifest.length if after is None else after.manifest.first_page * PAGE
            if end > begin:
                found.append(read_tokens(part)[max(begin - first, 0) : end - first])
        return np.concatenate(found)

    def reply_tokens(self, digest: str) -> list[int] | None:
        """The tokens of a reply's text, None if no snapshot has them or they cannot be read."""
        snapshot = self.with_reply(digest)
        reply = None if snapshot is None else snapshot.manifest.reply
        if snapshot is None or reply is None:
            return None
        begin, end = next(text[1:] for text in reply.texts if text[0] == digest)
        try:
            return [*tokens_of(self.tokens(snapshot, begin)).tolist(), *reply.rest][: end - begin]
        except (DamagedError, OSError) as error:
            _log.warning("the text of a reply is tokenized again: %s", error)
            return None

    # --- writing

    def begin(self, id: str, parent: Snapshot | None, raw_bytes: int) -> tuple[OpenDirectory, int, list[Snapshot]]:
        """Free space for a new snapshot: (its directory below tmp/, bytes reserved, snapshots that must stay).

        Raises StoreFullError, SnapshotGoneError or OSError.
        """
        self.rescan()
        self._directory.prepare()
        own = self._get(self.model, id)
        try:
            spared = [] if parent is None else self.chain(parent)
        except DamagedError as error:
            raise SnapshotGoneError(str(error)) from error
        if own is not None:
            spared.append(own)
        reserved = int(raw_bytes * self.compression)
        self.make_room(reserved, spared)
        return self._directory.new_tmp(), reserved, spared

    def commit(self, path: OpenDirectory, manifest: Manifest) -> Snapshot:
        """Make a snapshot of a directory below tmp/ that is written and synchronised. Raises OSError or
        SnapshotGoneError."""
        with self._writers:
            old = self._get(self.model, manifest.id)
            if old is not None:
                old = self._restore_state(old, path, manifest)
                self.mark_used(old)
                return old
            parent = self._get(self.model, manifest.parent)
            if manifest.first_page * PAGE > (0 if parent is None else parent.manifest.length):
                raise SnapshotGoneError("another server removed the snapshot that it continues")
            if self._directory.publish(path, manifest.id):
                self._put(Snapshot(manifest, self._directory.root, time.time()))
                if manifest.raw_bytes:
                    self.compression += (manifest.nbytes / manifest.raw_bytes - self.compression) / 4
                self._relink()
            else:
                # Another server wrote the same snapshot, maybe as the continuation of another one.
                self._directory.discard(path)
                self._seen.pop(self.model, None)
                self.rescan()
            snapshot = self._get(self.model, manifest.id)
            if snapshot is None:
                raise SnapshotGoneError(f"another server removed {self.root / self.model / manifest.id}")
            # The snapshots that it continues are in use too: the sequence may have resumed from memory.
            self.mark_used(snapshot)
            with contextlib.suppress(StoreFullError):
                # It may be larger than expected.
                self.make_room(0, self.chain(snapshot))
            return snapshot

    def discard(self, path: OpenDirectory) -> None:
        """Remove a directory below tmp/."""
        self._directory.discard(path)

    def account(self, grown: int) -> None:
        """Add to the bytes below tmp/."""
        with self._lock:
            self._writing += grown

    # --- evicting

    def make_room(self, size: int, spared: Sequence[Snapshot] = ()) -> None:
        """Evict snapshots, but for `spared`, until `size` bytes fit into the budget and the file system.

        Raises StoreFullError.
        """
        with self._writers:
            if self.budget and size > self.budget:
                raise StoreFullError(f"a snapshot of {size} bytes exceeds --kv-cache-budget")
            if self._shortage(size) <= 0:
                return
            with self._directory.lock() as locked:
                if locked and self._shortage(size) > 0:
                    self._directory.remove_outdated()
                    self._directory.empty_trash()
                    self._read_last_uses()
                while locked and self._shortage(size) > 0 and (victim := self._eviction_candidate(set(spared))):
                    self.evict(victim, spared)
                    self.evictions += 1
            if self._shortage(size) > 0:
                raise StoreFullError(f"no space for {size} bytes in {self.root}")

    def evict(self, snapshot: Snapshot, spared: Collection[Snapshot] = ()) -> None:
        """Make a snapshot unresumable. Its files go too unless another snapshot continues it, and so do those of its
        parents that only served it, but for `spared`, which a new snapshot is about to continue.

        Raises OSError if it cannot be removed.
        """
        with self._writers:
            if snapshot.children:
                self._remove_state(snapshot)
                return
            last: Snapshot | None = snapshot
            while last is not None:
                parent = self._get(last.manifest.model, last.manifest.parent)
                self._remove([last])
                unused = parent is not None and not parent.manifest.resumable and not parent.children
                last = parent if unused and parent not in spared else None

    def reload(self, snapshot: Snapshot) -> None:
        """Read a snapshot's manifest again: another process may have changed or removed the snapshot."""
        with self._writers:
            self._forget(snapshot)
            self._admit(snapshot.manifest.model, snapshot.manifest.id)
            self._relink()

    def quarantine(self, snapshot: Snapshot, reason: object) -> None:
        """Move a damaged snapshot to trash/, and remove the snapshots that continue it."""
        _log.warning("snapshot %s is damaged and moved to trash: %s", snapshot.manifest.id, reason)
        with self._writers:
            self.quarantines += 1
            self._drop(self.with_descendants(snapshot)[1:])
            self._forget(snapshot)
            self._directory.quarantine(snapshot.manifest.model, [snapshot.manifest.id])

    def clear(self, model: str | None = None) -> int:
        """Remove all snapshots, or those of one model; returns the number of resumable ones. Raises OSError."""
        with self._writers:
            found = [s for s in self._snapshots.values() if model in (None, s.manifest.model)]
            for name in {snapshot.manifest.model for snapshot in found}:
                roots = (s for s in found if s.manifest.model == name and s.manifest.parent is None)
                self._remove([s for root in roots for s in self.with_descendants(root)][::-1])
            return sum(snapshot.manifest.resumable for snapshot in found)

    def changed(self, snapshot: Snapshot) -> bool:
        """Whether another process removed a snapshot or replaced it by another one of the same tokens. Raises
        OSError."""
        try:
            with snapshot.open() as directory:
                data = directory.read(MANIFEST, MOST_BYTES)
            return manifests.decode(data, snapshot.manifest.model, snapshot.manifest.id) != snapshot.manifest
        except FileNotFoundError:
            return True
        except (DamagedError, IrregularFileError):
            return False

    def collect_garbage(self) -> None:
        """Remove pages that no snapshot continues, damaged snapshots and earlier formats, and enforce the budget."""
        with self._writers:
            while unused := [s for s in self._snapshots.values() if not s.manifest.resumable and not s.children]:
                for snapshot in unused:
                    self.evict(snapshot)
            self.tidy()
            self._directory.empty_trash()
            self._directory.remove_outdated()
            self.make_room(0)

    def holds(self, suffix: str) -> bool:
        """Whether --kv-cache-dir or a directory in it has a file whose name ends so. Raises OSError."""
        return self._directory.holds(suffix)

    def disk_bytes(self) -> int:
        """Bytes of everything of this format, whether an index names it or not. Raises OSError."""
        return self._directory.nbytes()

    def tidy(self, older_than: float = UNNAMED_SECONDS) -> None:
        """Remove files of snapshots that no manifest names: from processes that ended while they removed or restored a
        snapshot's state. `older_than` in seconds."""
        for snapshot in self.snapshots:
            named = {MANIFEST, *(part.name for part in snapshot.manifest.parts)}
            with contextlib.suppress(OSError), snapshot.open() as directory:
                for name in set(directory.names()).difference(named):
                    status = directory.status(name)
                    if not stat.S_ISDIR(status.st_mode) and time.time() - status.st_ctime > older_than:
                        directory.unlink(name)

    # --- for one writer at a time

    def _rescan(self, model: str, directory: OpenDirectory) -> None:
        """Update the index with the directories of a model, if these have changed."""
        changed = directory.changed_at()
        if self._seen.get(model) == changed:
            return
        # Whatever else lies there belongs to somebody else.
        names = set(filter(is_snapshot_id, directory.directories()))
        self._seen[model] = changed
        known = {id for other, id in self._snapshots if other == model}
        for id in known - names:
            self._forget(self._snapshots[model, id])
        self._admit(model, *(names - known))

    def _admit(self, model: str, *ids: str) -> None:
        """Add snapshots to the index, and quarantine the directories that are none."""
        problems: dict[str, Exception] = {}
        # Another server may have removed all of it, or some.
        with contextlib.suppress(FileNotFoundError), self._directory.open(model) as directory:
            for id in ids:
                try:
                    with directory.enter(id) as inner:
                        problem = self._load(model, id, inner)
                        if problem is not None and not directory.holds(id, inner):
                            continue
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._report_unreadable(model, id, error)
                    continue
                if problem is not None:
                    problems[id] = problem
        for number, (id, problem) in enumerate(problems.items()):
            if number == _REPORTED:
                _log.warning("%d more directories are no snapshots and moved to trash", len(problems) - number)
                break
            _log.warning("%s is not a snapshot and moved to trash: %s", self.root / model / id, problem)
        if problems:
            self.quarantines += len(problems)
            self._directory.quarantine(model, list(problems))

    def _load(self, model: str, id: str, directory: OpenDirectory) -> Exception | None:
        """Add a snapshot to the index, or return the problem with it. Raises OSError if it cannot be read."""
        problem: Exception | None = None
        seen: bytes | None = None
        # Another server may remove the state meanwhile: the manifest changes first, then the files go.
        while True:
            try:
                data = directory.read(MANIFEST, MOST_BYTES)
            except (FileNotFoundError, IrregularFileError) as error:
                # If another server removes the snapshot, no other manifest comes.
                return error
            if data == seen:
                return problem
            seen = data
            try:
                manifest = manifests.decode(data, model, id)
                for part in manifest.parts:
                    status = directory.status(part.name)
                    if not stat.S_ISREG(status.st_mode) or status.st_size != part.bytes:
                        raise DamagedError(f"{part.name} is no file of {part.bytes} bytes")
                last_used = directory.status(MANIFEST).st_mtime
            except IrregularFileError as error:
                return error
            except (DamagedError, FileNotFoundError) as error:
                problem = error
                continue
            self._put(Snapshot(manifest, self._directory.root, last_used))
            return None

    def _report_unreadable(self, model: str, id: str, error: OSError) -> None:
        if (model, id) not in self._unreadable:
            self._unreadable.add((model, id))
            _log.warning("%s cannot be read now: %s", self.root / model / id, error)

    def _relink(self) -> None:
        """Set parents and children; remove the snapshots whose parent is gone."""
        for snapshot in self._link():
            self._drop(self.with_descendants(snapshot))

    def _shortage(self, size: int) -> int:
        """Bytes by which `size` does not fit."""
        over = self.nbytes + size - self.budget if self.budget else 0
        return max(over, self._directory.shortage(size))

    def _read_last_uses(self) -> None:
        """Read when other processes last used the snapshots."""
        for snapshot in self._snapshots.values():
            with contextlib.suppress(OSError), snapshot.open() as directory:
                snapshot.last_used = max(snapshot.last_used, directory.status(MANIFEST).st_mtime)

    def _eviction_candidate(self, spared: set[Snapshot]) -> Snapshot | None:
        """The snapshot to evict next: one larger than the budget first, then one of a long unused model, then
        superseded ones, then the least recently used; of a conversation the longest."""
        # This process uses its own model, even if it does not use the snapshots.
        newest = {self.model: time.time()}
        for snapshot in self._snapshots.values():
            newest[snapshot.manifest.model] = max(newest.get(snapshot.manifest.model, 0.0), snapshot.last_used)
        end = time.time() - _UNUSED_SECONDS

        def rank(snapshot: Snapshot) -> tuple[bool, bool, bool, float, int]:
            manifest = snapshot.manifest
            # No eviction of others makes space for it: its size may be made up.
            fits = not self.budget or manifest.nbytes <= self.budget
            unused = newest[manifest.model] < end
            return fits, not unused, not snapshot.superseded, snapshot.last_used, -manifest.length

        # Pages of an unresumable snapshot only go together with the snapshots that continue it.
        resumable_or_last = (
            s for s in self._snapshots.values() if s not in spared and (s.manifest.resumable or not s.children)
        )
        return min(resumable_or_last, key=rank, default=None)

    def _remove_state(self, snapshot: Snapshot) -> None:
        """Remove everything of a snapshot but its tokens and pages."""
        manifest = manifests.without_state(snapshot.manifest)
        try:
            with snapshot.open() as directory:
                directory.replace(MANIFEST, manifest.encode())
                # Else the power may go when the files are removed and the old manifest names them.
                directory.sync()
                for part in snapshot.manifest.state:
                    with contextlib.suppress(FileNotFoundError):
                        directory.unlink(part.name)
        except FileNotFoundError:
            # Another server removed it meanwhile.
            self._forget(snapshot)
            return
        snapshot.manifest = manifest

    def _restore_state(self, snapshot: Snapshot, path: OpenDirectory, manifest: Manifest) -> Snapshot:
        """Move the state in a directory below tmp/ to a snapshot that has lost its own."""
        if snapshot.manifest.resumable:
            self._directory.discard(path)
            return snapshot
        whole = manifests.with_state(snapshot.manifest, manifest)
        try:
            with snapshot.open() as directory:
                for part in manifest.state:
                    path.move(part.name, directory, part.name)
                # Else the power may go when the manifest names the files and they have no names.
                directory.sync()
                directory.replace(MANIFEST, whole.encode())
                directory.sync()
                with self._directory.open(self.model) as model:
                    if not model.holds(manifest.id, directory):
                        raise FileNotFoundError(manifest.id)
        except FileNotFoundError:
            self._forget(snapshot)
            raise SnapshotGoneError(f"another server removed {snapshot.path}") from None
        finally:
            self._directory.discard(path)
        self._forget(snapshot)
        snapshot.manifest = whole
        self._put(snapshot)
        return snapshot

    def _remove(self, snapshots: Sequence[Snapshot]) -> None:
        """Remove snapshots of one model. Raises OSError."""
        if snapshots:
            self._directory.remove(snapshots[0].manifest.model, [snapshot.manifest.id for snapshot in snapshots])
        for snapshot in snapshots:
            self._forget(snapshot)

    def _drop(self, snapshots: Sequence[Snapshot]) -> None:
        """Forget snapshots, each behind the one that it continues; remove their files if possible."""
        with contextlib.suppress(OSError):
            self._remove(snapshots[::-1])
        for snapshot in snapshots:
            self._forget(snapshot)
