"""The directory below which snapshots lie: its subdirectories, its lock, and the garbage in it. FORMAT.md shows it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from luce.kvcache.disk.files import OpenDirectory, make_directory, open_directory, process_runs
from luce.kvcache.disk.manifest import FORMAT, LAYOUT

TMP, TRASH, LOCK = "tmp", "trash", "lock"
#: directories in tmp/ older than this have no writer, whatever process number they name
_ABANDONED_SECONDS = 3600.0
#: damaged snapshots that stay in trash/
_QUARANTINED = 3
#: how their names begin
_BAD = "bad-"
#: part of a file system that stays free: these bytes, or this share if that is less
_FREE_BYTES, _FREE_SHARE = 2 << 30, 0.05
_MODEL = re.compile(r"[0-9a-f]{32}")


class Directory:
    """`root` with the snapshots of all models. `model`: the one to write, "" for none.

    Every method raises OSError if the directory cannot be used, of which UnsafeDirectoryError says why Luce refuses it.
    """

    def __init__(self, root: Path, model: str) -> None:
        self.root = root
        self.model = model
        #: bytes of damaged snapshots in trash/
        self.trash_bytes = 0
        make_directory(root)
        with open_directory(root) as opened:
            #: directories of earlier formats, with their bytes
            self._outdated = {name: opened.size_of(name) for name in opened.directories() if _outdated(name)}
        # An earlier process may have ended between making them and synchronising their names.
        self.prepare(synchronise=True)
        self._sweep()

    @property
    def outdated(self) -> tuple[str, ...]:
        """What earlier formats left behind."""
        return tuple(sorted(self._outdated))

    @property
    def outdated_bytes(self) -> int:
        """Bytes that earlier formats left behind."""
        return sum(self._outdated.values())

    def open(self, *names: str) -> OpenDirectory:
        """Open the directory of this format, or one below it."""
        return open_directory(self.root, LAYOUT, *names)

    def prepare(self, *, synchronise: bool = False) -> None:
        """Create the missing subdirectories, so that they stay without power. `synchronise` also those that are there.

        FileNotFoundError: `root` itself is gone, as its disk may be.
        """
        with open_directory(self.root) as root:
            made = root.make(LAYOUT)
            with root.enter(LAYOUT) as layout:
                for name in filter(None, (TMP, TRASH, self.model)):
                    made |= layout.make(name)
                    layout.enter(name).close()
                if made or synchronise:
                    layout.sync()
                    root.sync()

    def models(self) -> list[str]:
        """The names of the models that have a directory."""
        try:
            with self.open() as layout:
                return [name for name in layout.directories() if _MODEL.fullmatch(name)]
        except FileNotFoundError:
            return []

    def new_tmp(self) -> OpenDirectory:
        """A new directory below tmp/ that names this process."""
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        with self.open(TMP) as tmp:
            if not tmp.make(name):
                raise FileExistsError(errno.EEXIST, "not a new directory", str(tmp.path / name))
            return tmp.enter(name)

    def discard(self, path: OpenDirectory) -> None:
        """Remove a directory below tmp/ with all that it holds, as far as that is possible."""
        with contextlib.suppress(OSError), self.open(TMP) as tmp:
            tmp.remove(path.path.name)

    def publish(self, path: OpenDirectory, id: str) -> bool:
        """Rename a directory below tmp/ to a snapshot of the model; False if there is one of that name."""
        with self.open(TMP) as tmp, self.open(self.model) as model:
            try:
                tmp.move(path.path.name, model, id)
                published = True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                published = False
            # Also where another process has renamed its own, which may not be on the disk yet.
            model.sync()
        return published

    def remove(self, model: str, ids: Sequence[str]) -> None:
        """Remove snapshots: first by renaming them, so that each disappears at once."""
        # Another server may have removed them.
        with (
            contextlib.suppress(FileNotFoundError),
            self.open() as layout,
            layout.enter(model) as directory,
        ):
            layout.make(TRASH)
            with layout.enter(TRASH) as trash:
                self._throw(directory, ids, trash)

    def quarantine(self, model: str, ids: Sequence[str]) -> None:
        """Move damaged snapshots to trash/, where the last ones stay for a while."""
        with contextlib.suppress(OSError), self.open(model) as directory, self.open(TRASH) as trash:
            for id in ids:
                with contextlib.suppress(OSError):
                    directory.move(id, trash, f"{_BAD}{time.time_ns()}-{id}")
            directory.sync()
            self.empty_trash(_QUARANTINED)

    def empty_trash(self, quarantined: int = 0) -> None:
        """Remove all of trash/ but the last `quarantined` damaged snapshots."""
        with self.open(TRASH) as trash:
            names = trash.names()
            spared = sorted(name for name in names if name.startswith(_BAD))[::-1][:quarantined]
            for name in set(names).difference(spared):
                trash.remove(name)
            self.trash_bytes = sum(trash.size_of(name) for name in spared)

    def remove_outdated(self) -> None:
        """Remove what earlier formats left behind."""
        with open_directory(self.root) as root, self.open(TRASH) as trash:
            while self._outdated:
                with contextlib.suppress(FileNotFoundError):
                    self._throw(root, [self._outdated.popitem()[0]], trash)

    def shortage(self, size: int) -> int:
        """Bytes that the file system lacks for `size` more bytes, negative if it has more."""
        with self.open() as layout:
            everything, free = layout.free()
        return size + min(_FREE_BYTES, int(everything * _FREE_SHARE)) - free

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the lock of the directory; False if another process holds it."""
        with self.open() as layout, layout.lock(LOCK) as locked:
            yield locked

    def nbytes(self) -> int:
        """Bytes of everything of this format."""
        with open_directory(self.root) as root:
            return root.size_of(LAYOUT)

    def holds(self, suffix: str) -> bool:
        """Whether `root` or a directory in it has a file whose name ends so."""
        with open_directory(self.root) as root:
            if any(name.endswith(suffix) for name in root.names()):
                return True
            for directory in root.directories():
                # Others may have their directories beside.
                with contextlib.suppress(OSError), root.enter(directory) as inner:
                    if any(name.endswith(suffix) for name in inner.names()):
                        return True
        return False

    def _throw(self, directory: OpenDirectory, names: Sequence[str], trash: OpenDirectory) -> None:
        """Move entries to trash/ and remove them there."""
        moved = []
        try:
            for name in names:
                new = f"{name}-{secrets.token_hex(4)}"
                with contextlib.suppress(FileNotFoundError):
                    directory.move(name, trash, new)
                    moved.append(new)
        finally:
            # Else the power may go when files of a snapshot are removed and its name is not.
            directory.sync()
            for new in moved:
                trash.remove(new)

    def _sweep(self) -> None:
        """Remove what writers left behind that have ended."""
        with self.open(TMP) as tmp:
            for name in tmp.names():
                with contextlib.suppress(OSError):
                    if not process_runs(name) or time.time() - tmp.status(name).st_mtime > _ABANDONED_SECONDS:
                        tmp.remove(name)
        self.empty_trash(_QUARANTINED)


def _outdated(name: str) -> bool:
    """Whether a directory is of an earlier format. They are not read, but they occupy disk space."""
    version = name.removeprefix("luce-v")
    return name != version and version.isdecimal() and int(version) < FORMAT
