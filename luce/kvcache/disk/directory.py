"""The directory below which snapshots lie: its subdirectories, its lock, and the garbage in it. FORMAT.md shows it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from luce.kvcache.disk.files import process_runs, size_of, sync_directory
from luce.kvcache.disk.manifest import FORMAT

LAYOUT = f"luce-v{FORMAT}"
#: directories in tmp/ older than this have no writer, whatever process number they name
_ABANDONED_SECONDS = 3600.0
#: damaged snapshots that stay in trash/
_QUARANTINED = 3
#: part of a file system that stays free: these bytes, or this share if that is less
_FREE_BYTES, _FREE_SHARE = 2 << 30, 0.05


class Directory:
    """`root` with the snapshots of all models. `model`: the one to write. Raises OSError if it cannot be created."""

    def __init__(self, root: Path, model: str) -> None:
        self.root = root / LAYOUT
        self.model = self.root / model
        self.tmp = self.root / "tmp"
        self.trash = self.root / "trash"
        #: bytes of damaged snapshots in trash/
        self.trash_bytes = 0
        #: directories of earlier formats, with their bytes
        self._outdated = {path: size_of(path) for path in _outdated(root)}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.prepare()
        self._sweep()

    @property
    def outdated_bytes(self) -> int:
        """Bytes that earlier formats left behind."""
        return sum(self._outdated.values())

    def prepare(self) -> None:
        """Create the missing subdirectories. Raises OSError if `root` itself is gone, as its disk may be."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        for directory in (self.tmp, self.trash, self.model):
            directory.mkdir(mode=0o700, exist_ok=True)

    def models(self) -> list[Path]:
        """The directories of all models."""
        try:
            items = list(os.scandir(self.root))
        except FileNotFoundError:
            return []
        others = (item for item in items if item.name not in ("tmp", "trash"))
        return [self.root / item.name for item in others if item.is_dir(follow_symlinks=False)]

    def new_tmp(self) -> Path:
        """A new directory below tmp/ that names this process. Raises OSError."""
        path = self.tmp / f"{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        return path

    def publish(self, path: Path, name: str) -> bool:
        """Rename a directory below tmp/ to a snapshot of the model; False if there is one of that name. Raises
        OSError."""
        try:
            os.rename(path, self.model / name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        sync_directory(self.model)
        return True

    def remove(self, path: Path) -> None:
        """Remove a snapshot: first by renaming it, so that it disappears at once. Raises OSError."""
        trash = self.trash / f"{path.name}-{secrets.token_hex(4)}"
        # Another server may have removed it.
        with contextlib.suppress(FileNotFoundError):
            self.trash.mkdir(mode=0o700, exist_ok=True)
            os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def quarantine(self, path: Path) -> None:
        """Move a damaged snapshot to trash/, where the last ones stay for a while."""
        with contextlib.suppress(OSError):
            os.rename(path, self.trash / f"bad-{time.time_ns()}-{path.name}")
            self.empty_trash(_QUARANTINED)

    def empty_trash(self, quarantined: int = 0) -> None:
        """Remove all of trash/ but the last `quarantined` damaged snapshots."""
        bad = sorted(path for path in self.trash.iterdir() if path.name.startswith("bad-"))
        spared = bad[::-1][:quarantined]
        for path in self.trash.iterdir():
            if path not in spared:
                shutil.rmtree(path, ignore_errors=True)
        self.trash_bytes = sum(size_of(path) for path in spared)

    def remove_outdated(self) -> None:
        """Remove what earlier formats left behind."""
        while self._outdated:
            shutil.rmtree(self._outdated.popitem()[0], ignore_errors=True)

    def shortage(self, size: int) -> int:
        """Bytes that the file system lacks for `size` more bytes, negative if it has more."""
        disk = shutil.disk_usage(self.root)
        return size + min(_FREE_BYTES, int(disk.total * _FREE_SHARE)) - disk.free

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the lock of the directory; False if another process holds it. Raises OSError."""
        with open(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _sweep(self) -> None:
        """Remove what writers left behind that have ended."""
        for path in self.tmp.iterdir():
            with contextlib.suppress(OSError):
                if not process_runs(path.name) or time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        self.empty_trash(_QUARANTINED)


def _outdated(root: Path) -> Iterator[Path]:
    """The directories of earlier formats. They are not read, but they occupy disk space."""
    for path in root.glob("luce-v*"):
        version = path.name.removeprefix("luce-v")
        if version.isdecimal() and int(version) < FORMAT and path.is_dir() and not path.is_symlink():
            yield path
