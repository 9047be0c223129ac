"""A model file of which only a part is there: header and directory in full, and tensors at their offsets.

    ~/.cache/luce/parts/FINGERPRINT/model.gguf or model-00001-of-00003.gguf ...    sparse files
                                    journal                                        what of them is there
                                    lock                                           of who uses them

The journal has a line of JSON for each range, [file, begin, end], and for each tensor that was compared with the
coordinator's, its name. It is written behind the data, so that it never says more than the disk has.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.errors import DeviceError

#: bytes and seconds behind which what was written goes to the disk
_SYNC_BYTES, _SYNC_SECONDS = 16 << 20, 0.5
#: bytes of the disk that are left to other programs
SPARE = 256 << 20
_PIECE = 4 << 20


class Ranges:
    """Disjoint ranges of numbers, ascending."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._begins: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Add a range, which may touch or overlap others."""
        first, last = bisect_left(self._ends, begin), bisect_left(self._begins, end + 1)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that are not there."""
        found = []
        for own, stop in zip(self._begins, self._ends, strict=True):
            if stop <= begin:
                continue
            if own >= end:
                break
            if own > begin:
                found.append((begin, own))
            begin = max(begin, stop)
        if begin < end:
            found.append((begin, end))
        return found

    def __iter__(self) -> zip[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)


class Parts:
    """The files of a model with a fingerprint, below `root`; `sizes`: their bytes. One process uses them at a time.

    Raises DeviceError if that cannot be, as on a full disk, and for what is no fingerprint.
    """

    def __init__(self, root: Path, fingerprint: str, sizes: Sequence[int]) -> None:
        if not (fingerprint.isascii() and fingerprint.isalnum()):
            # It comes from the server, and names a folder here.
            raise DeviceError(f"the server sent {fingerprint[:40]!r}, which is no fingerprint of a model")
        count = len(sizes)
        names = ["model.gguf"] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
        self._folder = root / fingerprint
        self.paths = [self._folder / name for name in names]
        self._sizes = tuple(sizes)
        self.there = [Ranges() for _ in sizes]
        #: tensors that have been compared with the coordinator's
        self.compared: set[str] = set()
        #: ranges and compared tensors that the journal does not have yet
        self._unsynced: list[tuple[int, int, int]] = []
        self._names: list[str] = []
        self._bytes, self._synced = 0, time.monotonic()
        with contextlib.ExitStack() as opened, _naming(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DeviceError(f"{self._folder}: another luce join uses it") from None
            os.utime(lock)
            self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in self.paths]
            for fd in self._files:
                opened.callback(os.close, fd)
            if [os.fstat(fd).st_size for fd in self._files] != list(sizes):
                (self._folder / "journal").unlink(missing_ok=True)
                for fd, size in zip(self._files, sizes, strict=True):
                    os.ftruncate(fd, size)
            self._journal = os.open(self._folder / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, self._journal)
            self._read_journal()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Write what is left, and let others use the files."""
        with self._opened:
            self.sync()

    def write(self, part: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes of a file. Raises DeviceError."""
        with _naming(self._folder):
            _write(self._files[part], np.ascontiguousarray(data).data, offset)
        self._unsynced.append((part, offset, offset + data.nbytes))
        self._bytes += data.nbytes
        if self._bytes >= _SYNC_BYTES or time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have the disk keep what was written, and then the journal say so. Raises DeviceError."""
        unsynced, names = self._unsynced, self._names
        # Forgotten first: behind an error the next fsync succeeds without what the disk has lost.
        self._unsynced, self._names, self._bytes, self._synced = [], [], 0, time.monotonic()
        with _naming(self._folder):
            for part in {part for part, _, _ in unsynced}:
                os.fsync(self._files[part])
            self._append([*unsynced, *names])
        for part, begin, end in unsynced:
            self.there[part].add(begin, end)
        self.compared.update(names)

    def sum(self, part: int, begin: int, end: int) -> bytes:
        """The SHA-256 of a range."""
        digest = hashlib.sha256()
        with _naming(self._folder):
            for at in range(begin, end, _PIECE):
                digest.update(os.pread(self._files[part], min(_PIECE, end - at), at))
        return digest.digest()

    def note_compared(self, tensor: str) -> None:
        """A tensor is equal to the coordinator's."""
        self._names.append(tensor)

    def forget(self) -> None:
        """Have nothing: the next fetch gets everything again."""
        with _naming(self._folder):
            os.ftruncate(self._journal, 0)
        self._unsynced, self._names, self.compared = [], [], set()
        self.there = [Ranges() for _ in self.there]

    def _append(self, entries: Sequence[object]) -> None:
        if not entries:
            return
        lines = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        end = os.fstat(self._journal).st_size
        try:
            _write(self._journal, memoryview(lines), end)
        except OSError:
            # No line follows half a line.
            os.ftruncate(self._journal, end)
            raise
        os.fsync(self._journal)

    def _read_journal(self) -> None:
        text = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        valid = 0
        for line in text.splitlines(keepends=True):
            try:
                entry = json.loads(line if line.endswith(b"\n") else b"")
                if isinstance(entry, str):
                    self.compared.add(entry)
                else:
                    self._believe(*entry)
            except (ValueError, TypeError):
                # The line that was being written when the process or the machine ended, or what no writing made.
                break
            valid += len(line)
        os.ftruncate(self._journal, valid)

    def _believe(self, part: int, begin: int, end: int) -> None:
        """A range of the journal is there. Raises ValueError unless it is a range of a file."""
        if {type(part), type(begin), type(end)} != {int} or not 0 <= part < len(self._sizes):
            raise ValueError("these are no numbers of a file")
        if not 0 <= begin < end <= self._sizes[part]:
            raise ValueError("this is no range of the file")
        self.there[part].add(begin, end)


def _write(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes. Raises OSError."""
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at:], offset + at)


def make_room(root: Path, fingerprint: str, size: int, limit: int) -> None:
    """Remove the least recently used other models below `root` until `size` more bytes fit on the disk, and all of them
    into `limit` bytes (0: no limit). Raises DeviceError if they do not fit even then."""
    with _naming(root):
        others = [entry for entry in root.iterdir() if entry.is_dir() and entry.name != fingerprint]
        others.sort(key=_last_used)
        # What other processes use stays.
        kept = _size(root / fingerprint)
        while True:
            free = shutil.disk_usage(root).free - SPARE
            total = kept + size + sum(map(_size, others))
            if size <= free and (not limit or total <= limit):
                return
            if not others:
                why = f"{max(0, free)} are free" if size > free else f"--cache-size allows {limit} in all"
                raise DeviceError(f"{root}: the weights of its layers need {size} more bytes, {why}")
            oldest = others.pop(0)
            _remove(oldest)
            kept += _size(oldest)


def _last_used(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / "lock").stat().st_mtime
    return 0.0


def _size(folder: Path) -> int:
    """The bytes of the disk that a folder's files take."""
    with contextlib.suppress(OSError):
        return sum(512 * entry.stat().st_blocks for entry in folder.iterdir())
    return 0


def _remove(folder: Path) -> None:
    """Remove a model's files, unless another process uses them."""
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """An OSError is a DeviceError that names the folder."""
    try:
        yield
    except OSError as error:
        raise DeviceError(f"{folder}: {error.strerror or error}") from error
