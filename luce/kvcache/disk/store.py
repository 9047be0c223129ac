"""A directory of snapshots: what comes, what goes, and in what order that reaches the disk. FORMAT.md shows the layout.

A snapshot is written in a directory of its own under tmp/ and renamed when everything is on the disk, the manifest
last: a crash leaves a whole snapshot or garbage that the next start sweeps away. What is deleted is renamed first, so a
reader with open files finishes. Several servers may share a directory: names are content hashes, a rename either
happens or does not, and only the holder of the lock gives snapshots up.

Looking something up never waits for the disk: one lock guards the index, another one is for those who write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from luce.errors import LuceError
from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.files import alive, read_if_there, size_of, sync_directory, write_file
from luce.kvcache.disk.index import Entry, Index
from luce.kvcache.disk.manifest import MANIFEST, Manifest, keys, snapshot_id
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.reader import Reader, read_tokens
from luce.kvcache.disk.writer import Writer
from luce.runtime.step import PAGE, Int32

_log = logging.getLogger(__name__)

LAYOUT = f"luce-v{manifests.FORMAT}"
#: snapshots of models that were of no use for so long go before all others
_FORGOTTEN_SECONDS = 30 * 86400.0
#: garbage in tmp/ older than this has no writer, whatever its process number says
_ABANDONED_SECONDS = 3600.0
#: files that came to a snapshot in so many seconds, and that its manifest does not name, may be about to be named
_UNNAMED_SECONDS = 60.0
_QUARANTINED = 3
#: of a file system, what stays free
_FREE_BYTES, _FREE_SHARE = 2 << 30, 0.05


class StoreFullError(LuceError):
    """There is no room for a snapshot, and none can be made."""


class GoneError(LuceError):
    """Somebody else removed what a snapshot rests on while it was written: the next one is written whole."""


class Store(Index):
    """The snapshots below `root`.

    `budget` in bytes covers everything below `root`; 0 for no limit. Thread-safe. Raises OSError if the directory
    cannot be made.
    """

    def __init__(self, root: Path, model: str, budget: int) -> None:
        super().__init__(model)
        self.root = root / LAYOUT
        self.budget = budget
        self._writers = threading.RLock()
        self._seen: dict[str, int] = {}
        #: bytes written to tmp/ by this process, and stored bytes per raw byte so far
        self._writing = 0
        self._ratio = 1.0
        #: bytes of what earlier versions of the format left behind
        self._older = {path: size_of(path) for path in self._outdated(root)}
        self.evictions = self.quarantines = 0
        self._trashed = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._prepare()
        self._sweep()
        self.rescan()
        self._tidy()

    @property
    def _tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def _trash(self) -> Path:
        return self.root / "trash"

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots, those that are being written or were put aside, and what earlier formats left."""
        with self._lock:
            stored = sum(entry.manifest.nbytes for entry in self._entries.values())
            return self._writing + self._trashed + stored + sum(self._older.values())

    # --- finding

    def rescan(self) -> None:
        """Take notice of what other processes wrote or removed."""
        with self._writers:
            models = self._models()
            for entry in self.entries:
                if entry.path.parent not in models:
                    self._forget(entry)
            for directory in models:
                try:
                    changed = directory.stat().st_mtime_ns
                    if self._seen.get(directory.name) == changed:
                        continue
                    names = {item.name for item in os.scandir(directory) if item.is_dir(follow_symlinks=False)}
                except FileNotFoundError:
                    continue
                self._seen[directory.name] = changed
                known = {id for model, id in self._entries if model == directory.name}
                for id in known - names:
                    self._forget(self._entries[directory.name, id])
                for id in names - known:
                    self._admit(directory, id)
            self._relink()

    def touch(self, entry: Entry) -> None:
        """A snapshot was of use, and with it those that it continues: all at one time, so that it goes before them."""
        now = time.time()
        # Somebody may have removed some of them.
        with contextlib.suppress(DamagedError):
            for part in self.chain(entry):
                part.used = now
                with contextlib.suppress(OSError):
                    os.utime(part.path / MANIFEST, (now, now))

    # --- reading

    def reader(self, entry: Entry) -> Reader:
        """Opens a snapshot's files, all of them before anything is read. Raises DamagedError or OSError."""
        return Reader(self.chain(entry))

    def tokens(self, entry: Entry, begin: int = 0) -> Int32:
        """The tokens of a snapshot from a position on: int32 [length - begin]. Raises DamagedError or OSError."""
        pieces: list[Int32] = [np.empty(0, np.int32)]
        chain = self.chain(entry)
        for part, after in zip(chain, [*chain[1:], None], strict=True):
            first = part.manifest.first * PAGE
            end = part.manifest.length if after is None else after.manifest.first * PAGE
            if end > begin:
                pieces.append(read_tokens(part)[max(begin - first, 0) : end - first])
        return np.concatenate(pieces)

    def recall(self, digest: str) -> list[int] | None:
        """The ids of a text of a reply, None if they cannot be had."""
        entry = self.said(digest)
        recall = None if entry is None else entry.manifest.recall
        if entry is None or recall is None:
            return None
        begin, end = next(text[1:] for text in recall.texts if text[0] == digest)
        try:
            return [*self.tokens(entry, begin).tolist(), *recall.behind][: end - begin]
        except (DamagedError, OSError) as error:
            _log.warning("a reply's tokens are those of its text: %s", error)
            return None

    # --- writing

    def writer(self, ids: Int32, parent: Entry | None, first: int, raw: int, *, passing: bool) -> Writer:
        """A new snapshot of about `raw` bytes. Raises StoreFullError or OSError."""
        self._prepare()
        ((length, key),) = keys(ids, [len(ids)])
        own = self._get(self.model, snapshot_id(key, length))
        keep = [*([] if parent is None else self.chain(parent)), *([] if own is None else [own])]
        reserved = int(raw * self._ratio)
        self.make_room(reserved, keep)
        path = self._tmp / f"{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        ends = "".join(manifests.prefixes(ids, first))
        writer = Writer(self, path, len(ids), key, ends, parent, first, passing, reserved, keep)
        try:
            writer.tokens(ids[first * PAGE :])
        except BaseException:
            writer.abort()
            raise
        return writer

    def commit(self, path: Path, manifest: Manifest) -> Entry:
        """Make a directory that is written and synchronised a snapshot. Raises OSError, GoneError."""
        with self._writers:
            directory = self.root / self.model
            old = self._get(self.model, manifest.id)
            if old is not None:
                old = self._revive(old, path, manifest)
                self.touch(old)
                return old
            parent = self._get(self.model, manifest.parent)
            if manifest.first * PAGE > (0 if parent is None else parent.manifest.length):
                raise GoneError("the snapshot that this one continues is gone")
            if self._renamed(path, directory / manifest.id):
                sync_directory(directory)
                entry = Entry(manifest, directory / manifest.id, time.time())
                self._put(entry)
                if manifest.raw:
                    self._ratio += (manifest.nbytes / manifest.raw - self._ratio) / 4
            else:
                # Another server wrote the same.
                shutil.rmtree(path, ignore_errors=True)
                self._admit(directory, manifest.id)
                if self._get(self.model, manifest.id) is None:
                    raise GoneError(f"{directory / manifest.id} was removed by another server")
            self._relink()
            entry = self._entries[self.model, manifest.id]
            # What it continues was of use, perhaps in memory, of which nobody tells the disk.
            self.touch(entry)
            with contextlib.suppress(StoreFullError):
                # It may have become larger than was thought.
                self.make_room(0, self.chain(entry))
            return entry

    def account(self, grown: int) -> None:
        """So many more bytes are in tmp/ (fewer, if negative)."""
        with self._lock:
            self._writing += grown

    # --- giving up

    def make_room(self, size: int, keep: Sequence[Entry] = ()) -> None:
        """Give snapshots up until `size` bytes fit into the budget and the file system. Raises StoreFullError."""
        with self._writers:
            if self.budget and size > self.budget:
                raise StoreFullError(f"a snapshot of {size} bytes exceeds --kv-cache-budget")
            if self._lacking(size) <= 0:
                return
            with self._exclusive() as held:
                kept = set(keep)
                if held and self._lacking(size) > 0:
                    self._remove_older()
                    self._empty_trash(0)
                    self._note_uses()
                while held and self._lacking(size) > 0 and (victim := self._coldest(kept)) is not None:
                    self.give_up(victim, kept)
                    self.evictions += 1
            if self._lacking(size) > 0:
                raise StoreFullError(f"no room for {size} bytes in {self.root}")

    def give_up(self, entry: Entry, keep: Collection[Entry] = ()) -> None:
        """A snapshot can no longer be resumed; it goes as a whole if no other continues it, and so do its parents but
        for those to `keep`, which somebody is about to continue. Raises OSError if it cannot be removed."""
        with self._writers:
            if entry.children:
                self._retire(entry)
                return
            parent = self._get(entry.manifest.model, entry.manifest.parent)
            self._remove(entry)
            if parent is not None and parent not in keep and not parent.manifest.point and not parent.children:
                self.give_up(parent, keep)

    def reread(self, entry: Entry) -> None:
        """Look at a snapshot again, which another process may have changed or removed."""
        with self._writers:
            self._forget(entry)
            self._admit(entry.path.parent, entry.manifest.id)
            self._relink()

    def quarantine(self, entry: Entry, reason: object) -> None:
        """Put a damaged snapshot aside, and give up those that continue it."""
        _log.warning("snapshot %s is damaged and put aside: %s", entry.manifest.id, reason)
        with self._writers:
            self.quarantines += 1
            for child in list(entry.children):
                self._drop(child)
            self._forget(entry)
            self._put_aside(entry.path)

    def clear(self, model: str | None = None) -> int:
        """Give up every snapshot of a model, or of all; returns how many could be resumed. Raises OSError."""
        with self._writers:
            found = [entry for entry in self._entries.values() if model in (None, entry.manifest.model)]
            for entry in found:
                if entry.manifest.parent is None:
                    self._remove_all(entry)
            return sum(entry.manifest.point for entry in found)

    def changed(self, entry: Entry) -> bool:
        """Whether another process removed a snapshot, or put another one of the same tokens in its place. Raises
        OSError."""
        try:
            data = (entry.path / MANIFEST).read_bytes()
            return manifests.decode(data, entry.manifest.model, entry.manifest.id) != entry.manifest
        except FileNotFoundError:
            return True
        except DamagedError:
            return False

    def collect(self) -> None:
        """Remove what nothing needs: pages that no snapshot continues, and what was put aside. Keep to the budget."""
        with self._writers:
            while useless := [e for e in self._entries.values() if not e.manifest.point and not e.children]:
                for entry in useless:
                    self.give_up(entry)
            self._tidy()
            self._empty_trash(0)
            self._remove_older()
            self.make_room(0)

    # What follows is called by writers, one at a time.

    @staticmethod
    def _outdated(root: Path) -> Iterator[Path]:
        """The directories of earlier versions of the format: of no use, but they take room."""
        for path in root.glob("luce-v*"):
            version = path.name.removeprefix("luce-v")
            if version.isdecimal() and int(version) < manifests.FORMAT and path.is_dir() and not path.is_symlink():
                yield path

    def _models(self) -> list[Path]:
        try:
            items = list(os.scandir(self.root))
        except FileNotFoundError:
            return []
        others = (item for item in items if item.name not in ("tmp", "trash"))
        return [self.root / item.name for item in others if item.is_dir(follow_symlinks=False)]

    def _remove_older(self) -> None:
        while self._older:
            shutil.rmtree(self._older.popitem()[0], ignore_errors=True)

    @staticmethod
    def _renamed(path: Path, target: Path) -> bool:
        """Give a directory its name; False if there is another one with it. Raises OSError."""
        try:
            os.rename(path, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def _admit(self, directory: Path, id: str) -> None:
        """Take a snapshot into the index if it is one, else put it aside."""
        path = directory / id
        try:
            problem = self._index(path)
        except OSError as error:
            _log.warning("%s cannot be read now: %s", path, error)
            return
        if problem is not None and path.exists():
            _log.warning("%s: not a snapshot, put aside: %s", path, problem)
            self.quarantines += 1
            self._put_aside(path)

    def _index(self, path: Path) -> Exception | None:
        """Add a snapshot, or say what is wrong with it. Raises OSError if it cannot be read."""
        problem: Exception | None = None
        seen: bytes | None = None
        # Another server may take the state away while this looks: first the manifest changes, then the files go.
        while seen != (data := read_if_there(path / MANIFEST)):
            seen = data
            try:
                manifest = manifests.decode(data, path.parent.name, path.name)
                for part in manifest.parts:
                    if (size := (path / part.name).stat().st_size) != part.bytes:
                        raise DamagedError(f"{part.name} has {size} bytes instead of {part.bytes}")
                entry = Entry(manifest, path, (path / MANIFEST).stat().st_mtime)
            except (DamagedError, FileNotFoundError) as error:
                problem = error
                continue
            self._put(entry)
            return None
        return problem

    def _relink(self) -> None:
        """Find out who continues whom; give up what continues nothing that is there."""
        for entry in self._link():
            self._drop(entry)

    def _lacking(self, size: int) -> int:
        """By how many bytes `size` does not fit."""
        disk = shutil.disk_usage(self.root)
        floor = min(_FREE_BYTES, int(disk.total * _FREE_SHARE))
        over = self.nbytes + size - self.budget if self.budget else 0
        return max(over, size + floor - disk.free)

    def _note_uses(self) -> None:
        """Take notice of when snapshots were of use to other processes."""
        for entry in self._entries.values():
            with contextlib.suppress(OSError):
                entry.used = max(entry.used, (entry.path / MANIFEST).stat().st_mtime)

    def _coldest(self, kept: set[Entry]) -> Entry | None:
        """What to give up first: of models that were of no use for long, what longer snapshots replace, what was of no
        use for longest; of a conversation the longest."""
        # This process's own model is in use, whatever its snapshots are.
        newest = {self.model: time.time()}
        for entry in self._entries.values():
            newest[entry.manifest.model] = max(newest.get(entry.manifest.model, 0.0), entry.used)
        end = time.time() - _FORGOTTEN_SECONDS

        def rank(entry: Entry) -> tuple[bool, bool, float, int]:
            forgotten = newest[entry.manifest.model] < end
            return not forgotten, not entry.dispensable, entry.used, -entry.manifest.length

        # One that only serves others frees nothing before they are gone.
        worth = (e for e in self._entries.values() if e not in kept and (e.manifest.point or not e.children))
        return min(worth, key=rank, default=None)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """The lock of the directory; False if another process has it."""
        with open(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _retire(self, entry: Entry) -> None:
        """Leave nothing of a snapshot but its tokens and pages."""
        manifest = manifests.without_state(entry.manifest)
        try:
            self._rewrite(entry, manifest)
        except FileNotFoundError:
            # Another server removed it meanwhile.
            self._forget(entry)
            return
        for part in entry.manifest.state:
            (entry.path / part.name).unlink(missing_ok=True)
        entry.manifest = manifest

    def _rewrite(self, entry: Entry, manifest: Manifest) -> None:
        """Another manifest in the place of a snapshot's own. Two servers may do this at once: each has its own file."""
        new = entry.path / f"{MANIFEST}.{secrets.token_hex(4)}"
        write_file(new, manifest.encode())
        os.replace(new, entry.path / MANIFEST)
        sync_directory(entry.path)

    def _revive(self, entry: Entry, path: Path, manifest: Manifest) -> Entry:
        """Give a snapshot back the state that `path` holds, if it has none."""
        if entry.manifest.point:
            shutil.rmtree(path, ignore_errors=True)
            return entry
        whole = manifests.with_state(entry.manifest, manifest)
        try:
            for part in manifest.state:
                os.replace(path / part.name, entry.path / part.name)
            self._rewrite(entry, whole)
        except FileNotFoundError:
            self._forget(entry)
            raise GoneError(f"{entry.path} was removed by another server") from None
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self._forget(entry)
        entry.manifest = whole
        self._put(entry)
        return entry

    def _remove_all(self, entry: Entry) -> None:
        for child in list(entry.children):
            self._remove_all(child)
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        trash = self._trash / f"{entry.manifest.id}-{secrets.token_hex(4)}"
        # Another server may have removed it.
        with contextlib.suppress(FileNotFoundError):
            self._trash.mkdir(mode=0o700, exist_ok=True)
            os.rename(entry.path, trash)
        self._forget(entry)
        shutil.rmtree(trash, ignore_errors=True)

    def _drop(self, entry: Entry) -> None:
        """Forget a snapshot that is of no use, and what continues it; remove them if that is possible."""
        for child in list(entry.children):
            self._drop(child)
        with contextlib.suppress(OSError):
            self._remove(entry)
        self._forget(entry)

    def _prepare(self) -> None:
        """Make what is missing below the directory. Raises OSError if that itself is gone, as its disk may be."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        for directory in (self._tmp, self._trash, self.root / self.model):
            directory.mkdir(mode=0o700, exist_ok=True)

    def _put_aside(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.rename(path, self._trash / f"bad-{time.time_ns()}-{path.name}")
            self._empty_trash(_QUARANTINED)

    def _sweep(self) -> None:
        """Remove what ended writers left behind."""
        for path in self._tmp.iterdir():
            with contextlib.suppress(OSError):
                if not alive(path.name) or time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        self._empty_trash(_QUARANTINED)

    def _tidy(self) -> None:
        """Remove from snapshots what processes left there that ended while they took a state away or gave one back."""
        for entry in self.entries:
            named = {MANIFEST, *(part.name for part in entry.manifest.parts)}
            with contextlib.suppress(OSError):
                for item in os.scandir(entry.path):
                    if item.name not in named and time.time() - item.stat().st_ctime > _UNNAMED_SECONDS:
                        os.unlink(item)

    def _empty_trash(self, kept: int) -> None:
        """Leave nothing there but so many of those that were put aside last."""
        bad = sorted(path for path in self._trash.iterdir() if path.name.startswith("bad-"))
        left = bad[::-1][:kept]
        for path in self._trash.iterdir():
            if path not in left:
                shutil.rmtree(path, ignore_errors=True)
        self._trashed = sum(size_of(path) for path in left)
