"""Small file operations for a directory of snapshots."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a file and synchronise it: it is on the disk when this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Synchronise the names in a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_if_there(path: Path) -> bytes:
    """The bytes of a file, b"" if it does not exist. Raises OSError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def size_of(path: Path) -> int:
    """Bytes of all files below a directory, without those that cannot be seen."""
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def process_runs(name: str) -> bool:
    """Whether the process of a directory called `<pid>-...` runs."""
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
