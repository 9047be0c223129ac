"""The calls by which luce.kvcache.disk.files touches the disk, recorded one by one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from luce.kvcache.disk import files

#: names of `os` that are passed through: they touch no entry of a directory, or a descriptor that was recorded
PASSED = {"fstat", "fstatvfs", "geteuid", "getpid", "kill", "path", "pread"}


@dataclass(frozen=True)
class Call:
    """A call that succeeded, with the paths that it names, below the recorded root."""

    name: str
    path: str
    #: of a rename
    new_path: str = ""
    #: of a write
    data: bytes = b""


class RecordedOS:
    """Stands for `os` in luce.kvcache.disk.files. A function that is not known here fails: every new one is recorded.

    calls   those that changed anything or made it last, and "saved" of `mark`
    names   every path that any call named, whether there was anything or not
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[int, str] = {}
        self.calls: list[Call] = []
        self.names: set[str] = set()
        #: the most descriptors at a time
        self.most_open = 0

    def __getattr__(self, name: str) -> Any:
        if name in PASSED or name.startswith("O_"):
            return getattr(os, name)
        raise AssertionError(f"os.{name} is not recorded")

    def mark(self, text: str) -> None:
        """Note what has been reported at this place among the calls."""
        self.calls.append(Call("saved", text))

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        at = self._at(path, dir_fd)
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        self._paths[fd] = at
        self.most_open = max(self.most_open, len(self._paths))
        if flags & os.O_CREAT:
            self.calls.append(Call("create", at))
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        os.close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        count = os.write(fd, data)
        self.calls.append(Call("write", self._paths[fd], data=bytes(data[:count])))
        return count

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        self.calls.append(Call("fsync", self._paths[fd]))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        at = self._at(path, dir_fd)
        os.mkdir(path, mode, dir_fd=dir_fd)
        self.calls.append(Call("mkdir", at))

    def rename(self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self._at(old, src_dir_fd), self._at(new, dst_dir_fd)
        os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self.calls.append(Call("rename", source, target))
        # Descriptors of a directory go with it.
        for fd, path in self._paths.items():
            if path == source or path.startswith(source + "/"):
                self._paths[fd] = target + path[len(source) :]

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        at = self._at(path, dir_fd)
        os.unlink(path, dir_fd=dir_fd)
        self.calls.append(Call("unlink", at))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        at = self._at(path, dir_fd)
        os.rmdir(path, dir_fd=dir_fd)
        self.calls.append(Call("rmdir", at))

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        self._at(path, dir_fd)
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    def lstat(self, path: Any) -> os.stat_result:
        self._at(path, None)
        return os.lstat(path)

    def utime(self, path: Any, times: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        self._at(path, dir_fd)
        os.utime(path, times, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    def scandir(self, fd: int) -> Any:
        names = os.listdir(fd)
        self.names.update(os.path.join(self._paths[fd], name) for name in names)
        return os.scandir(fd)

    def listdir(self, fd: int) -> list[str]:
        names = os.listdir(fd)
        self.names.update(os.path.join(self._paths[fd], name) for name in names)
        return names

    def _at(self, path: Any, dir_fd: int | None) -> str:
        """A path below the root; "." for the root itself, with ".." for what lies outside."""
        text = os.fspath(path)
        at = os.path.relpath(text, self._root) if dir_fd is None else os.path.join(self._paths[dir_fd], text)
        at = os.path.normpath(at)
        self.names.add(at)
        return at


@contextmanager
def same_names() -> Iterator[None]:
    """Random names are the same each time."""
    numbers = itertools.count()
    with mock.patch("secrets.token_hex", lambda count: f"{next(numbers):0{2 * count}x}"):
        yield


@contextmanager
def recorded(root: Path) -> Iterator[RecordedOS]:
    """Record what luce.kvcache.disk.files does below `root`. Random names are the same each time."""
    calls = RecordedOS(root)
    with mock.patch.object(files, "os", calls), same_names():
        yield calls
