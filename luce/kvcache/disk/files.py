"""Small steps on a directory of snapshots."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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


def read_if_there(path: Path) -> bytes:
    """A file's bytes, none if there is no such file. Raises OSError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def size_of(path: Path) -> int:
    """Bytes of all files below a directory, as far as they can be seen."""
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def alive(name: str) -> bool:
    """Whether the process that a directory is named after, `<pid>-...`, is there."""
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
