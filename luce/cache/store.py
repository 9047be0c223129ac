"""A directory of snapshots: find, write, read, give up. FORMAT.md shows the layout.

A snapshot is written in a directory of its own under tmp/ and renamed when everything is on the disk, the manifest
last: a crash leaves a whole snapshot or garbage that the next start sweeps away. What is deleted is renamed first, so a
reader with open files finishes. Several servers may share a directory: names are content hashes, a rename either
happens or does not, and only the holder of the lock gives snapshots up.

Looking something up never waits for the disk: one lock guards the index, another one is for those who write.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import luce
from luce.cache import manifest as manifests
from luce.cache.manifest import Manifest, keys, snapshot_id
from luce.cache.part import DamagedError, Encoded, Frame, PartInfo, PartReader, PartWriter, encode
from luce.cache.tree import Tensors
from luce.errors import LuceError
from luce.runtime.step import PAGE, Int32

_log = logging.getLogger(__name__)

#: `map`, or that of an executor
Spread = Callable[[Callable[[NDArray[np.generic]], Encoded], Iterable[NDArray[np.generic]]], Iterable[Encoded]]

LAYOUT = "luce-v2"
_MANIFEST = "manifest.json"
_LOGITS = "logits"
#: snapshots of models that were of no use for so long go before all others
_FORGOTTEN_SECONDS = 30 * 86400.0
#: garbage in tmp/ older than this has no writer, whatever its process number says
_ABANDONED_SECONDS = 3600.0
_QUARANTINED = 3
#: of a file system, what stays free
_FREE_BYTES, _FREE_SHARE = 2 << 30, 0.05


class StoreFullError(LuceError):
    """There is no room for a snapshot, and none can be made."""


@dataclass(eq=False)
class Entry:
    """A snapshot that is on the disk. `used` in seconds since the epoch; `unusable` says why it is not found."""

    manifest: Manifest
    path: Path
    used: float
    unusable: str = ""
    children: set[Entry] = field(default_factory=set)

    @property
    def dispensable(self) -> bool:
        """Whether a longer snapshot of the same conversation took its place."""
        return self.manifest.passing and bool(self.children)


class Store:
    """The snapshots of all models below `root`; those of `model` are found, the others only take room.

    `budget` in bytes covers everything below `root`; 0 for no limit. Thread-safe. Raises OSError if the directory
    cannot be made.
    """

    def __init__(self, root: Path, model: str, budget: int) -> None:
        self.root = root / LAYOUT
        self.model = model
        self.budget = budget
        self._lock = threading.Lock()
        self._writers = threading.RLock()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._seen: dict[str, int] = {}
        #: bytes written to tmp/ by this process, and stored bytes per raw byte so far
        self._writing = 0
        self._ratio = 1.0
        self.evictions = self.quarantines = 0
        for directory in (self.root, self._tmp, self._trash, self.root / model):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()
        self.rescan()

    @property
    def _tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def _trash(self) -> Path:
        return self.root / "trash"

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots, and of those that are being written."""
        with self._lock:
            return self._writing + sum(entry.manifest.nbytes for entry in self._entries.values())

    @property
    def entries(self) -> list[Entry]:
        """All snapshots of all models."""
        with self._lock:
            return list(self._entries.values())

    # --- finding

    def rescan(self) -> None:
        """Take notice of what other processes wrote or removed."""
        with self._writers:
            for directory in self._models():
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
            self._link()

    def find(self, ids: Int32, beyond: int = 0) -> list[Entry]:
        """The snapshots that `ids` begin with and that can be resumed, of more than `beyond` tokens, longest first.

        A snapshot of all of `ids` needs the logits of the last token.
        """
        with self._lock:
            mine = [e for e in self._entries.values() if e.manifest.model == self.model and e.manifest.point]
            lengths = sorted({e.manifest.length for e in mine if beyond < e.manifest.length <= len(ids)})
            found = [self._entries.get((self.model, snapshot_id(key, n))) for n, key in keys(ids, lengths)]
            usable = (e for e in reversed(found) if e is not None and e.manifest.point and not e.unusable)
            return [e for e in usable if e.manifest.length < len(ids) or e.manifest.logits]

    def chain(self, entry: Entry) -> list[Entry]:
        """A snapshot behind those that it continues, the first one first. Raises DamagedError if one is missing."""
        with self._lock:
            chain = [entry]
            while (parent := chain[-1].manifest.parent) is not None:
                found = self._entries.get((entry.manifest.model, parent))
                if found is None or found in chain:
                    raise DamagedError(f"{entry.manifest.id}: its beginning, {parent}, is gone")
                chain.append(found)
            return chain[::-1]

    def touch(self, entry: Entry) -> None:
        """A snapshot was of use."""
        for part in self.chain(entry):
            part.used = time.time()
            with contextlib.suppress(OSError):
                os.utime(part.path / _MANIFEST)

    def newest(self, count: int) -> list[Entry]:
        """The snapshots of this model that were of use last and that none continues."""
        with self._lock:
            mine = [e for e in self._entries.values() if e.manifest.model == self.model and not e.children]
            return sorted(mine, key=lambda entry: entry.used)[-count:]

    # --- reading

    def reader(self, entry: Entry) -> Reader:
        """Opens a snapshot's files, all of them before anything is read. Raises DamagedError or OSError."""
        return Reader(self.chain(entry))

    def tokens(self, entry: Entry) -> Int32:
        """The tokens of a snapshot: int32 [length]. Raises DamagedError or OSError."""
        pieces: list[Int32] = []
        chain = self.chain(entry)
        for part, after in zip(chain, [*chain[1:], None], strict=True):
            piece = read_tokens(part)
            end = part.manifest.length if after is None else after.manifest.first * PAGE
            pieces.append(piece[: end - part.manifest.first * PAGE])
        return np.concatenate(pieces)

    # --- writing

    def missing(self, ids: Int32) -> tuple[Entry | None, int] | None:
        """What a snapshot of `ids` has to store: (the snapshot that it continues, its first page); None if it is there.

        Where only the tokens and pages of one are left, it is that one's parent, and no page.
        """
        with self._lock:
            mine = [e.manifest for e in self._entries.values() if e.manifest.model == self.model]
            lengths = sorted({m.length for m in mine if m.length <= len(ids)})
            found = {n: self._entries.get((self.model, snapshot_id(key, n))) for n, key in keys(ids, lengths)}
            same = found.pop(len(ids), None)
            if same is not None:
                parent = self._entries.get((self.model, same.manifest.parent or ""))
                return None if same.manifest.point else (parent, len(ids) // PAGE)
            longest = max((n for n, e in found.items() if e is not None and not e.unusable and n >= PAGE), default=0)
            return found.get(longest), longest // PAGE

    def writer(
        self, ids: Int32, parent: Entry | None, first: int, raw: int, *, passing: bool, spread: Spread = map
    ) -> Writer:
        """A new snapshot of about `raw` bytes; `spread` encodes tensors side by side, if it can.

        Raises StoreFullError or OSError.
        """
        ((length, key),) = keys(ids, [len(ids)])
        own = self._entries.get((self.model, snapshot_id(key, length)))
        keep = [*([] if parent is None else self.chain(parent)), *([] if own is None else [own])]
        self.make_room(int(raw * self._ratio), keep)
        path = self._tmp / f"{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        writer = Writer(self, path, len(ids), key, parent, first, passing, spread)
        try:
            writer.tokens(ids[first * PAGE :])
        except BaseException:
            writer.abort()
            raise
        return writer

    def commit(self, path: Path, manifest: Manifest) -> Entry:
        """Make a directory that is written and synchronised a snapshot. Raises OSError, StoreFullError."""
        with self._writers:
            directory = self.root / self.model
            old = self._entries.get((self.model, manifest.id))
            if old is not None:
                return self._revive(old, path, manifest)
            parent = self._entries.get((self.model, manifest.parent or ""))
            if manifest.first * PAGE > (0 if parent is None else parent.manifest.length):
                raise StoreFullError("the snapshot that this one continues is gone")
            try:
                os.rename(path, directory / manifest.id)
            except OSError:
                # Another server may have written the same.
                self._admit(directory, manifest.id)
                if (self.model, manifest.id) not in self._entries:
                    raise
                shutil.rmtree(path, ignore_errors=True)
            else:
                sync_directory(directory)
                entry = Entry(manifest, directory / manifest.id, time.time())
                with self._lock:
                    self._entries[self.model, manifest.id] = entry
                if manifest.raw:
                    self._ratio += (manifest.nbytes / manifest.raw - self._ratio) / 4
            self._link()
            entry = self._entries[self.model, manifest.id]
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
                while held and self._lacking(size) > 0 and (victim := self._coldest(kept)) is not None:
                    self.give_up(victim)
                    self.evictions += 1
            if self._lacking(size) > 0:
                raise StoreFullError(f"no room for {size} bytes in {self.root}")

    def give_up(self, entry: Entry) -> None:
        """A snapshot can no longer be resumed; it goes as a whole if no other continues it, and so do its parents."""
        with self._writers:
            if entry.children:
                self._retire(entry)
                return
            parent = self._entries.get((entry.manifest.model, entry.manifest.parent or ""))
            self._remove(entry)
            if parent is not None and not parent.manifest.point and not parent.children:
                self.give_up(parent)

    def quarantine(self, entry: Entry, reason: object) -> None:
        """Put a damaged snapshot aside, and give up those that continue it."""
        _log.warning("snapshot %s is damaged and put aside: %s", entry.manifest.id, reason)
        with self._writers:
            self.quarantines += 1
            for child in list(entry.children):
                self._remove_all(child)
            self._forget(entry)
            self._put_aside(entry.path)

    def clear(self, model: str | None = None) -> int:
        """Give up every snapshot of a model, or of all; returns how many could be resumed."""
        with self._writers:
            found = [entry for entry in self._entries.values() if model in (None, entry.manifest.model)]
            for entry in found:
                if entry.manifest.parent is None:
                    self._remove_all(entry)
            return sum(entry.manifest.point for entry in found)

    def collect(self) -> None:
        """Remove what nothing needs: pages that no snapshot continues, and what was put aside. Keep to the budget."""
        with self._writers:
            while useless := [e for e in self._entries.values() if not e.manifest.point and not e.children]:
                for entry in useless:
                    self.give_up(entry)
            for path in self._trash.iterdir():
                shutil.rmtree(path, ignore_errors=True)
            self.make_room(0)

    # What follows is called by writers, one at a time.

    def _models(self) -> list[Path]:
        with os.scandir(self.root) as items:
            return [
                self.root / item.name
                for item in items
                if item.name not in ("tmp", "trash") and item.is_dir(follow_symlinks=False)
            ]

    def _admit(self, directory: Path, id: str) -> None:
        path = directory / id
        try:
            data, used = (path / _MANIFEST).read_bytes(), (path / _MANIFEST).stat().st_mtime
            manifest = manifests.decode(data, directory.name, id)
            for part in manifest.parts:
                if (size := (path / part.name).stat().st_size) != part.bytes:
                    raise DamagedError(f"{part.name} has {size} bytes instead of {part.bytes}")
        except (DamagedError, OSError) as error:
            if path.exists():
                _log.warning("%s: not a snapshot, put aside: %s", path, error)
                self.quarantines += 1
                self._put_aside(path)
            return
        with self._lock:
            self._entries[directory.name, id] = Entry(manifest, path, used)

    def _link(self) -> None:
        """Find out who continues whom; give up what continues nothing that is there."""
        for entry in self._entries.values():
            entry.children = set()
        orphans = []
        for (model, _), entry in self._entries.items():
            if entry.manifest.parent is not None:
                parent = self._entries.get((model, entry.manifest.parent))
                if parent is None or parent.manifest.length < entry.manifest.first * PAGE:
                    orphans.append(entry)
                else:
                    parent.children.add(entry)
        for entry in orphans:
            self._remove_all(entry)

    def _lacking(self, size: int) -> int:
        """By how many bytes `size` does not fit."""
        disk = shutil.disk_usage(self.root)
        floor = min(_FREE_BYTES, int(disk.total * _FREE_SHARE))
        over = self.nbytes + size - self.budget if self.budget else 0
        return max(over, size + floor - disk.free)

    def _coldest(self, kept: set[Entry]) -> Entry | None:
        """What to give up first."""
        now = time.time()
        newest: dict[str, float] = {}
        for entry in self._entries.values():
            newest[entry.manifest.model] = max(newest.get(entry.manifest.model, 0.0), entry.used)

        def rank(entry: Entry) -> tuple[bool, bool, float, int]:
            forgotten = now - newest[entry.manifest.model] > _FORGOTTEN_SECONDS
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
        new = entry.path / f"{_MANIFEST}.{secrets.token_hex(4)}"
        write_file(new, manifest.encode())
        os.replace(new, entry.path / _MANIFEST)
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
            raise StoreFullError(f"{entry.path} was removed by another server") from None
        finally:
            shutil.rmtree(path, ignore_errors=True)
        entry.manifest = whole
        return entry

    def _remove_all(self, entry: Entry) -> None:
        for child in list(entry.children):
            self._remove_all(child)
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._forget(entry)
        trash = self._trash / f"{entry.manifest.id}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            os.rename(entry.path, trash)
            shutil.rmtree(trash, ignore_errors=True)

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            self._entries.pop((entry.manifest.model, entry.manifest.id), None)
        parent = self._entries.get((entry.manifest.model, entry.manifest.parent or ""))
        if parent is not None:
            parent.children.discard(entry)

    def _put_aside(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.rename(path, self._trash / f"bad-{time.time_ns()}-{path.name}")
        self._empty_trash()

    def _sweep(self) -> None:
        """Remove what ended writers left behind."""
        for path in self._tmp.iterdir():
            with contextlib.suppress(OSError):
                if not _alive(path.name) or time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        self._empty_trash()

    def _empty_trash(self) -> None:
        bad = sorted(path.name for path in self._trash.iterdir() if path.name.startswith("bad-"))
        for path in self._trash.iterdir():
            if path.name not in bad[-_QUARANTINED:]:
                shutil.rmtree(path, ignore_errors=True)


class Writer:
    """One snapshot while it is written. `abort` it, or `finish` it. Methods raise OSError."""

    def __init__(
        self,
        store: Store,
        path: Path,
        length: int,
        key: str,
        parent: Entry | None,
        first: int,
        passing: bool,
        spread: Spread,
    ) -> None:
        self._store = store
        self._path = path
        self._length = length
        self._key = key
        self._parent = parent
        self._first = first
        self._spread = spread
        self._passing = passing
        self._raw = self._accounted = 0
        self._open: dict[str, PartWriter] = {}
        self._logits = False

    def tokens(self, ids: Int32) -> None:
        """Those from page `first` on."""
        self._write({"tokens": ids.astype("<i4")}, lambda name: "tokens.part")

    def pages(self, first: int, tensors: Tensors, layers: Sequence[range]) -> None:
        """Whole pages from number `first` on, in a file for each range of layers."""
        self._write(tensors, lambda name: _file("pages", name, layers), first)

    def state(self, tensors: Tensors, logits: NDArray[np.float32] | None, layers: Sequence[range]) -> None:
        """What the point has beside pages."""
        self._write(tensors, lambda name: _file("state", name, layers))
        if logits is not None:
            self._logits = True
            self._write({_LOGITS: logits}, lambda name: "state-logits.part")

    def finish(self) -> Entry:
        """Everything is written: make it a snapshot."""
        parts = {name: part.finish() for name, part in self._open.items()}
        manifest = Manifest(
            format=manifests.FORMAT,
            writer=luce.__version__,
            model=self._store.model,
            id=snapshot_id(self._key, self._length),
            key=self._key,
            length=self._length,
            created=time.time(),
            parent=None if self._parent is None else self._parent.manifest.id,
            first=self._first,
            passing=self._passing,
            point=True,
            logits=self._logits,
            tokens=parts["tokens.part"],
            pages=tuple(part for name, part in parts.items() if name.startswith("pages")),
            state=tuple(part for name, part in parts.items() if name.startswith("state")),
            raw=self._raw,
        )
        write_file(self._path / _MANIFEST, manifest.encode())
        sync_directory(self._path)
        entry = self._store.commit(self._path, manifest)
        self._settle()
        return entry

    def abort(self) -> None:
        """Remove what was written. Idempotent."""
        for part in self._open.values():
            with contextlib.suppress(OSError):
                part.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._settle()

    def _write(self, tensors: Tensors, file: Callable[[str], str], page: int = -1) -> None:
        for (name, tensor), encoded in zip(tensors.items(), self._spread(encode, tensors.values()), strict=True):
            part = self._open.get(file(name))
            if part is None:
                part = self._open[file(name)] = PartWriter(self._path / file(name))
            before = part.nbytes
            part.add(name, tensor, encoded, page)
            self._raw += tensor.nbytes
            self._accounted += part.nbytes - before
            self._store.account(part.nbytes - before)

    def _settle(self) -> None:
        self._store.account(-self._accounted)
        self._accounted = 0


class Reader:
    """A snapshot and those that it continues, all files open. Thread-safe; raises DamagedError."""

    def __init__(self, chain: Sequence[Entry]) -> None:
        self.manifest = chain[-1].manifest
        self._parts: list[PartReader] = []
        #: by first page: the frames of a run of pages, and how many pages of them count
        self.runs: list[tuple[int, int, list[tuple[PartReader, Frame]]]] = []
        self._state: list[tuple[PartReader, Frame]] = []
        try:
            for entry, after in zip(chain, [*chain[1:], None], strict=True):
                end = entry.manifest.length // PAGE if after is None else after.manifest.first
                self._open_pages(entry, end)
            for info in self.manifest.state:
                part = self._opened(chain[-1].path, info)
                self._state += [(part, frame) for frame in part.frames]
            self._tokens = self._opened(chain[-1].path, self.manifest.tokens)
        except BaseException:
            self.close()
            raise

    def tokens(self) -> Int32:
        """Those that this snapshot stores itself: from page `manifest.first` on."""
        return _tokens(self._tokens)

    def state_frames(self) -> list[tuple[PartReader, Frame]]:
        """The frames of the point's state."""
        return [(part, frame) for part, frame in self._state if frame.name != _LOGITS]

    def logits(self) -> NDArray[np.float32] | None:
        """Those of the last token, if they are there."""
        for part, frame in self._state:
            if frame.name == _LOGITS:
                return part.read(frame).astype(np.float32, copy=False)
        return None

    def close(self) -> None:
        """Idempotent."""
        for part in self._parts:
            part.close()

    def _open_pages(self, entry: Entry, end: int) -> None:
        found: dict[int, list[tuple[PartReader, Frame]]] = {}
        for info in entry.manifest.pages:
            part = self._opened(entry.path, info)
            for frame in part.frames:
                found.setdefault(frame.page, []).append((part, frame))
        at = entry.manifest.first
        for first in sorted(found):
            counts = {frame.shape[0] // PAGE for _, frame in found[first] if frame.shape}
            if first != at or len(counts) != 1:
                raise DamagedError(f"{entry.manifest.id}: page {at} is missing")
            (count,) = counts
            if first < end:
                self.runs.append((first, min(count, end - first), found[first]))
            at += count
        if found and at < end:
            raise DamagedError(f"{entry.manifest.id}: page {at} is missing")

    def _opened(self, directory: Path, info: PartInfo) -> PartReader:
        self._parts.append(PartReader(directory, info))
        return self._parts[-1]


def read_tokens(entry: Entry) -> Int32:
    """The tokens that a snapshot stores itself. Raises DamagedError or OSError."""
    part = PartReader(entry.path, entry.manifest.tokens)
    try:
        return _tokens(part)
    finally:
        part.close()


def verify(entry: Entry) -> None:
    """Read everything that a snapshot stores itself. Raises DamagedError or OSError."""
    for info in entry.manifest.parts:
        part = PartReader(entry.path, info)
        try:
            for frame in part.frames:
                part.read(frame)
        finally:
            part.close()


def write_file(path: Path, data: bytes) -> None:
    """Write a file; it is on the disk when this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Put a directory's names on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _tokens(part: PartReader) -> Int32:
    if len(part.frames) != 1:
        raise DamagedError("not one frame of tokens")
    return part.read(part.frames[0]).astype(np.int32, copy=False)


def _file(kind: str, name: str, layers: Sequence[range]) -> str:
    """`blk.N.NAME` belongs into the file of the range of layers that has N."""
    layer = int(name.split(".")[1])
    own = next(r for r in layers if layer in r)
    return f"{kind}-{own.start:03d}-{own.stop - 1:03d}.part"


def _alive(name: str) -> bool:
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
