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
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from luce.errors import LuceError
from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.directory import Directory
from luce.kvcache.disk.files import read_if_there, sync_directory, write_file
from luce.kvcache.disk.index import Index, Snapshot
from luce.kvcache.disk.manifest import MANIFEST, Manifest
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.reader import Reader, read_tokens
from luce.runtime.step import PAGE, Int32

_log = logging.getLogger(__name__)

#: the snapshots of models unused for this long are evicted before all others
_UNUSED_SECONDS = 30 * 86400.0
#: files that a manifest does not name may be about to be named while they are younger than this
UNNAMED_SECONDS = 60.0


class StoreFullError(LuceError):
    """The budget or the disk has no space for a snapshot, and eviction cannot free enough."""


class SnapshotGoneError(LuceError):
    """Another server removed what a snapshot continues while it was written. The next one is written whole."""


class Store(Index):
    """The snapshots below `root`. Thread-safe. Raises OSError if the directory cannot be created.

    `budget`: bytes of everything below `root`, 0 for no limit.
    """

    def __init__(self, root: Path, model: str, budget: int) -> None:
        super().__init__(model)
        self._directory = Directory(root, model)
        self.root = self._directory.root
        self.budget = budget
        self._writers = threading.RLock()
        #: by model, the directory's time of change at the last look
        self._seen: dict[str, int] = {}
        #: bytes that this process has written to tmp/
        self._writing = 0
        #: stored bytes per raw byte, averaged over the snapshots so far
        self.compression = 1.0
        self.evictions = self.quarantines = 0
        self.rescan()
        self.tidy()

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
                if snapshot.path.parent not in models:
                    self._forget(snapshot)
            for directory in models:
                try:
                    changed = directory.stat().st_mtime_ns
                    if self._seen.get(directory.name) == changed:
                        continue
                    names = {item.name for item in os.scandir(directory) if item.is_dir(follow_symlinks=False)}
                except FileNotFoundError:
                    continue
                self._seen[directory.name] = changed
                known = {id for model, id in self._snapshots if model == directory.name}
                for id in known - names:
                    self._forget(self._snapshots[directory.name, id])
                for id in names - known:
                    self._admit(directory, id)
            self._relink()

    def mark_used(self, snapshot: Snapshot) -> None:
        """Note that a snapshot is used now, and so are those that it continues: with equal times it is evicted before
        them."""
        now = time.time()
        # Another server may have removed some of them.
        with contextlib.suppress(DamagedError):
            for part in self.chain(snapshot):
                part.last_used = now
                with contextlib.suppress(OSError):
                    os.utime(part.path / MANIFEST, (now, now))

    # --- reading

    def open(self, snapshot: Snapshot) -> Reader:
        """Open all files of a snapshot. Raises DamagedError or OSError."""
        return Reader(self.chain(snapshot))

    def tokens(self, snapshot: Snapshot, begin: int = 0) -> Int32:
        """The tokens of a snapshot from position `begin` on: int32 [length - begin]. Raises DamagedError or OSError."""
        found: list[Int32] = [np.empty(0, np.int32)]
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
            return [*self.tokens(snapshot, begin).tolist(), *reply.rest][: end - begin]
        except (DamagedError, OSError) as error:
            _log.warning("the text of a reply is tokenized again: %s", error)
            return None

    # --- writing

    def begin(self, id: str, parent: Snapshot | None, raw_bytes: int) -> tuple[Path, int, list[Snapshot]]:
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

    def commit(self, path: Path, manifest: Manifest) -> Snapshot:
        """Make a snapshot of a directory that is written and synchronised. Raises OSError or SnapshotGoneError."""
        with self._writers:
            target = self._directory.model / manifest.id
            old = self._get(self.model, manifest.id)
            if old is not None:
                old = self._restore_state(old, path, manifest)
                self.mark_used(old)
                return old
            parent = self._get(self.model, manifest.parent)
            if manifest.first_page * PAGE > (0 if parent is None else parent.manifest.length):
                raise SnapshotGoneError("another server removed the snapshot that it continues")
            if self._directory.publish(path, manifest.id):
                self._put(Snapshot(manifest, target, time.time()))
                if manifest.raw_bytes:
                    self.compression += (manifest.nbytes / manifest.raw_bytes - self.compression) / 4
            else:
                # Another server wrote the same snapshot.
                shutil.rmtree(path, ignore_errors=True)
                self._admit(self._directory.model, manifest.id)
                if self._get(self.model, manifest.id) is None:
                    raise SnapshotGoneError(f"another server removed {target}")
            self._relink()
            snapshot = self._snapshots[self.model, manifest.id]
            # The snapshots that it continues are in use too: the sequence may have resumed from memory.
            self.mark_used(snapshot)
            with contextlib.suppress(StoreFullError):
                # It may be larger than expected.
                self.make_room(0, self.chain(snapshot))
            return snapshot

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
            parent = self._get(snapshot.manifest.model, snapshot.manifest.parent)
            self._remove(snapshot)
            if parent is not None and parent not in spared and not parent.manifest.resumable and not parent.children:
                self.evict(parent, spared)

    def reload(self, snapshot: Snapshot) -> None:
        """Read a snapshot's manifest again: another process may have changed or removed the snapshot."""
        with self._writers:
            self._forget(snapshot)
            self._admit(snapshot.path.parent, snapshot.manifest.id)
            self._relink()

    def quarantine(self, snapshot: Snapshot, reason: object) -> None:
        """Move a damaged snapshot to trash/, and remove the snapshots that continue it."""
        _log.warning("snapshot %s is damaged and moved to trash: %s", snapshot.manifest.id, reason)
        with self._writers:
            self.quarantines += 1
            for child in list(snapshot.children):
                self._drop(child)
            self._forget(snapshot)
            self._directory.quarantine(snapshot.path)

    def clear(self, model: str | None = None) -> int:
        """Remove all snapshots, or those of one model; returns the number of resumable ones. Raises OSError."""
        with self._writers:
            found = [s for s in self._snapshots.values() if model in (None, s.manifest.model)]
            for snapshot in found:
                if snapshot.manifest.parent is None:
                    self._remove_all(snapshot)
            return sum(snapshot.manifest.resumable for snapshot in found)

    def changed(self, snapshot: Snapshot) -> bool:
        """Whether another process removed a snapshot or replaced it by another one of the same tokens. Raises
        OSError."""
        try:
            data = (snapshot.path / MANIFEST).read_bytes()
            return manifests.decode(data, snapshot.manifest.model, snapshot.manifest.id) != snapshot.manifest
        except FileNotFoundError:
            return True
        except DamagedError:
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

    def tidy(self, older_than: float = UNNAMED_SECONDS) -> None:
        """Remove files of snapshots that no manifest names: from processes that ended while they removed or restored a
        snapshot's state. `older_than` in seconds."""
        for snapshot in self.snapshots:
            named = {MANIFEST, *(part.name for part in snapshot.manifest.parts)}
            with contextlib.suppress(OSError):
                for item in os.scandir(snapshot.path):
                    if item.name not in named and time.time() - item.stat().st_ctime > older_than:
                        os.unlink(item)

    # --- for one writer at a time

    def _admit(self, directory: Path, id: str) -> None:
        """Add a snapshot to the index, or quarantine the directory if it is none."""
        path = directory / id
        try:
            problem = self._load(path)
        except OSError as error:
            _log.warning("%s cannot be read now: %s", path, error)
            return
        if problem is not None and path.exists():
            _log.warning("%s is not a snapshot and moved to trash: %s", path, problem)
            self.quarantines += 1
            self._directory.quarantine(path)

    def _load(self, path: Path) -> Exception | None:
        """Add a snapshot to the index, or return the problem with it. Raises OSError if it cannot be read."""
        problem: Exception | None = None
        seen: bytes | None = None
        # Another server may remove the state meanwhile: the manifest changes first, then the files go.
        while seen != (data := read_if_there(path / MANIFEST)):
            seen = data
            try:
                manifest = manifests.decode(data, path.parent.name, path.name)
                for part in manifest.parts:
                    if (size := (path / part.name).stat().st_size) != part.bytes:
                        raise DamagedError(f"{part.name} has {size} bytes instead of {part.bytes}")
                snapshot = Snapshot(manifest, path, (path / MANIFEST).stat().st_mtime)
            except (DamagedError, FileNotFoundError) as error:
                problem = error
                continue
            self._put(snapshot)
            return None
        return problem

    def _relink(self) -> None:
        """Set parents and children; remove the snapshots whose parent is gone."""
        for snapshot in self._link():
            self._drop(snapshot)

    def _shortage(self, size: int) -> int:
        """Bytes by which `size` does not fit."""
        over = self.nbytes + size - self.budget if self.budget else 0
        return max(over, self._directory.shortage(size))

    def _read_last_uses(self) -> None:
        """Read when other processes last used the snapshots."""
        for snapshot in self._snapshots.values():
            with contextlib.suppress(OSError):
                snapshot.last_used = max(snapshot.last_used, (snapshot.path / MANIFEST).stat().st_mtime)

    def _eviction_candidate(self, spared: set[Snapshot]) -> Snapshot | None:
        """The snapshot to evict next: of a long unused model first, then superseded ones, then the least recently used;
        of a conversation the longest."""
        # This process uses its own model, even if it does not use the snapshots.
        newest = {self.model: time.time()}
        for snapshot in self._snapshots.values():
            newest[snapshot.manifest.model] = max(newest.get(snapshot.manifest.model, 0.0), snapshot.last_used)
        end = time.time() - _UNUSED_SECONDS

        def rank(snapshot: Snapshot) -> tuple[bool, bool, float, int]:
            unused = newest[snapshot.manifest.model] < end
            return not unused, not snapshot.superseded, snapshot.last_used, -snapshot.manifest.length

        # Pages of an unresumable snapshot only go together with the snapshots that continue it.
        resumable_or_last = (
            s for s in self._snapshots.values() if s not in spared and (s.manifest.resumable or not s.children)
        )
        return min(resumable_or_last, key=rank, default=None)

    def _remove_state(self, snapshot: Snapshot) -> None:
        """Remove everything of a snapshot but its tokens and pages."""
        manifest = manifests.without_state(snapshot.manifest)
        try:
            self._rewrite(snapshot, manifest)
        except FileNotFoundError:
            # Another server removed it meanwhile.
            self._forget(snapshot)
            return
        for part in snapshot.manifest.state:
            (snapshot.path / part.name).unlink(missing_ok=True)
        snapshot.manifest = manifest

    def _rewrite(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Replace a snapshot's manifest. Two servers may do so at once: each writes a file of its own first."""
        new = snapshot.path / f"{MANIFEST}.{secrets.token_hex(4)}"
        write_file(new, manifest.encode())
        os.replace(new, snapshot.path / MANIFEST)
        sync_directory(snapshot.path)

    def _restore_state(self, snapshot: Snapshot, path: Path, manifest: Manifest) -> Snapshot:
        """Move the state below `path` to a snapshot that has lost its own."""
        if snapshot.manifest.resumable:
            shutil.rmtree(path, ignore_errors=True)
            return snapshot
        whole = manifests.with_state(snapshot.manifest, manifest)
        try:
            for part in manifest.state:
                os.replace(path / part.name, snapshot.path / part.name)
            self._rewrite(snapshot, whole)
        except FileNotFoundError:
            self._forget(snapshot)
            raise SnapshotGoneError(f"another server removed {snapshot.path}") from None
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self._forget(snapshot)
        snapshot.manifest = whole
        self._put(snapshot)
        return snapshot

    def _remove_all(self, snapshot: Snapshot) -> None:
        for child in list(snapshot.children):
            self._remove_all(child)
        self._remove(snapshot)

    def _remove(self, snapshot: Snapshot) -> None:
        self._directory.remove(snapshot.path)
        self._forget(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot and those that continue it; remove their files if possible."""
        for child in list(snapshot.children):
            self._drop(child)
        with contextlib.suppress(OSError):
            self._remove(snapshot)
        self._forget(snapshot)
