"""Files of a directory of snapshots. No link is followed, and nothing outside the directory is touched.

Every operation names an entry of an open directory, which is reached from --kv-cache-dir one name at a time. A link
that another process plants at any of these names ends the operation; one that it plants later changes nothing, as the
descriptor stays that of the directory that was checked. --kv-cache-dir itself may be a link: its user wrote it.

This is the only module of the package that names files: tests record its calls to try every link, and to lose whatever
was not synchronised.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from luce.config.directories import refusal

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: a FIFO without a writer is opened at once; `_regular` refuses it then
_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: directories below a directory whose sizes count: a snapshot has none, and trash/ holds snapshots
_DEEPEST = 8
#: attempts to remove a directory that others fill
_ATTEMPTS = 5
#: what an entry is that is neither a file nor a directory
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class UnsafeDirectoryError(OSError):
    """A directory that Luce does not enter: a link is in its place, another user owns it, or everybody may write it."""


class IrregularFileError(OSError):
    """A link, a directory, a FIFO, a socket or a device has the name of a file."""


class NewFile:
    """A file that is being written. Every method raises OSError."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        """Synchronise the file: its bytes are on the disk when this returns. Its name is not."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class OpenDirectory:
    """An open directory; a context manager. `path` is for messages. Every method raises OSError."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- directories in it

    def enter(self, name: str) -> OpenDirectory:
        """Open a directory. Raises UnsafeDirectoryError, and FileNotFoundError if there is nothing of that name."""
        try:
            fd = os.open(_checked(name), _OPEN_DIRECTORY, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise UnsafeDirectoryError(f"{self.path / name} is {self._kind(name)}, not a directory") from None
        return _accepted(fd, self.path / name)

    def make(self, name: str) -> bool:
        """Create a directory; False if there is something of that name. It is lost with the power until `sync`."""
        try:
            os.mkdir(_checked(name), 0o700, dir_fd=self._fd)
        except FileExistsError:
            return False
        return True

    def directories(self) -> list[str]:
        """The names of the directories in it."""
        with os.scandir(self._fd) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def holds(self, name: str, directory: OpenDirectory) -> bool:
        """Whether an open directory has this name here now: another process may have moved it meanwhile."""
        try:
            here, there = self.status(name), os.fstat(directory._fd)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def changed_at(self) -> int:
        """When a name in it was created, renamed or removed last, in nanoseconds since the epoch."""
        return os.fstat(self._fd).st_mtime_ns

    def names(self) -> list[str]:
        """All names in it."""
        return os.listdir(self._fd)

    # --- files in it

    def status(self, name: str) -> os.stat_result:
        """Size, times and kind of an entry, of a link itself. Raises FileNotFoundError."""
        return os.stat(_checked(name), dir_fd=self._fd, follow_symlinks=False)

    def open(self, name: str) -> int:
        """A descriptor to read a file with. Raises IrregularFileError and FileNotFoundError."""
        return self._regular(name, os.O_RDONLY)

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a file. Raises IrregularFileError, also for one of more than `most` bytes, and
        FileNotFoundError."""
        fd = self.open(name)
        try:
            size = os.fstat(fd).st_size
            if size > most:
                raise IrregularFileError(f"{self.path / name} has {size} bytes; at most {most} are expected")
            return os.pread(fd, most, 0)
        finally:
            os.close(fd)

    def create(self, name: str) -> NewFile:
        """A new file. Raises FileExistsError if there is anything of that name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FILE
        return NewFile(os.open(_checked(name), flags, 0o600, dir_fd=self._fd))

    def replace(self, name: str, data: bytes) -> None:
        """Give a file these bytes: after a crash it has either the old ones or the new ones, once `sync` returned the
        new ones."""
        new = f"{name}.{secrets.token_hex(4)}"
        file = self.create(new)
        try:
            try:
                file.write(data)
                file.sync()
            finally:
                file.close()
            os.rename(new, _checked(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._fd)
            raise

    def write(self, name: str, data: bytes) -> None:
        """Create a file of these bytes and synchronise it. Raises FileExistsError if there is anything of that name."""
        file = self.create(name)
        try:
            file.write(data)
            file.sync()
        finally:
            file.close()

    def unlink(self, name: str) -> None:
        """Remove a file or a link, not what it points at. Raises FileNotFoundError."""
        os.unlink(_checked(name), dir_fd=self._fd)

    def touch(self, name: str, time: float) -> None:
        """Set the time of change of a file, in seconds since the epoch; of a link its own."""
        os.utime(_checked(name), (time, time), dir_fd=self._fd, follow_symlinks=False)

    # --- both

    def move(self, name: str, to: OpenDirectory, new_name: str) -> None:
        """Rename an entry, into another directory of the same file system. A file of the new name is replaced."""
        os.rename(_checked(name), _checked(new_name), src_dir_fd=self._fd, dst_dir_fd=to._fd)

    def sync(self) -> None:
        """Synchronise the names in it: what was created, renamed and removed stays so without power."""
        os.fsync(self._fd)

    def remove(self, name: str) -> None:
        """Remove an entry with all that it holds, as far as that is possible. A link goes, what it points at stays.

        Directories in it move up here first: neither deep ones nor many take more than two descriptors.
        """
        names = [name]
        while names:
            name = names.pop()
            with contextlib.suppress(OSError):
                if not stat.S_ISDIR(self.status(name).st_mode):
                    self.unlink(name)
                    continue
                for _ in range(_ATTEMPTS):
                    names += self._empty(name)
                    try:
                        os.rmdir(name, dir_fd=self._fd)
                        break
                    except OSError as error:
                        # Another process that has it open has just written to it.
                        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                            raise

    def size_of(self, name: str) -> int:
        """Bytes of an entry with all that it holds, without what cannot be seen."""
        total = 0
        found: list[tuple[str, ...]] = [(name,)]
        while found:
            *above, last = found.pop()
            with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
                directory = self
                for part in above:
                    directory = opened.enter_context(directory.enter(part))
                status = directory.status(last)
                if not stat.S_ISDIR(status.st_mode):
                    total += status.st_size
                elif len(above) < _DEEPEST:
                    inner = opened.enter_context(directory.enter(last))
                    for entry, size in inner._sizes():
                        if size is None:
                            found.append((*above, last, entry))
                        else:
                            total += size
        return total

    def free(self) -> tuple[int, int]:
        """(all bytes, free bytes) of its file system."""
        found = os.fstatvfs(self._fd)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Hold the lock of a file, which is created; False if another process holds it."""
        with contextlib.suppress(FileExistsError):
            self.create(name).close()
        fd = self._regular(name, os.O_RDWR)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def _regular(self, name: str, flags: int) -> int:
        # The first look keeps devices closed: opening one may do something.
        if not stat.S_ISREG(self.status(name).st_mode):
            raise IrregularFileError(f"{self.path / name} is {self._kind(name)}, not a file")
        fd = os.open(name, flags | _OPEN_FILE, dir_fd=self._fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise IrregularFileError(f"{self.path / name} has just become {self._kind(name)}")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _kind(self, name: str) -> str:
        mode = stat.S_IFMT(self.status(name).st_mode)
        return "a file" if mode == stat.S_IFREG else _KINDS.get(mode, "a device")

    def _empty(self, name: str) -> list[str]:
        """Remove the files of a directory and move its directories up here; returns their new names."""
        moved: list[str] = []
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=self._fd)
        with OpenDirectory(fd, self.path / name) as inner:
            if os.fstat(fd).st_dev != os.fstat(self._fd).st_dev:
                return []  # another file system is mounted here
            for entry in inner.names():
                with contextlib.suppress(OSError):
                    if stat.S_ISDIR(inner.status(entry).st_mode):
                        new = f"below-{secrets.token_hex(8)}"
                        inner.move(entry, self, new)
                        moved.append(new)
                    else:
                        inner.unlink(entry)
        return moved

    def _sizes(self) -> Iterator[tuple[str, int | None]]:
        """(name, bytes) of the entries; None for directories."""
        for name in self.names():
            with contextlib.suppress(OSError):
                status = self.status(name)
                yield name, None if stat.S_ISDIR(status.st_mode) else status.st_size


def open_directory(root: Path, *names: str) -> OpenDirectory:
    """Open `root`, or a directory below it. Raises UnsafeDirectoryError and FileNotFoundError."""
    link = os.lstat(root)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise UnsafeDirectoryError(f"{root} is a link that belongs to user {link.st_uid}")
    directory = _accepted(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), root)
    for name in names:
        with directory:
            directory = directory.enter(name)
    return directory


def make_directory(root: Path) -> None:
    """Create `root` and the directories above it that are missing, so that they stay without power. Raises OSError."""
    missing = []
    while not os.path.lexists(root):
        missing.append(root)
        root = root.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def process_runs(name: str) -> bool:
    """Whether the process of a directory called `<pid>-...` runs."""
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _accepted(fd: int, path: Path) -> OpenDirectory:
    """An open directory, after a look at its owner and its mode."""
    try:
        reason = refusal(os.fstat(fd))
        if reason:
            raise UnsafeDirectoryError(f"{path}: {reason}")
    except BaseException:
        os.close(fd)
        raise
    return OpenDirectory(fd, path)


def _checked(name: str) -> str:
    """A name that stays in its directory."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise IrregularFileError(f"{name!r} is not the name of a file")
    return name
