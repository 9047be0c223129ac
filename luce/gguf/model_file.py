"""A model file that is read by position, or mapped where nobody can change it meanwhile (mapped_file.py)."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.errors import FormatError, ModelError
from luce.gguf.mapped_file import MappedFile, map_file


class _Descriptor:
    """An open descriptor, closed with the last reference: a read that holds one never meets a number that another file
    has taken over."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


class ModelFile:
    """An open regular file, the same one whatever its path names later. Any thread may read.

    Raises ModelError if the file cannot be opened, FormatError if it is empty. `close` closes the file behind the reads
    in progress, and any later read raises ValueError. Without `close` the file is closed with the object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Opening a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        self._descriptor: _Descriptor | None = _Descriptor(fd)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise ModelError(f"{path}: is {'a directory' if stat.S_ISDIR(facts.st_mode) else 'not a regular file'}")
        self._lock = threading.Lock()
        self._mapped: MappedFile | None = None
        self._maps = True
        #: bytes
        self.size = facts.st_size
        self._changed = facts.st_mtime_ns
        #: equal for two objects of the same file without a change in between
        self.identity = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
        if not self.size:
            self.close()
            raise FormatError(f"{path}: is empty")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._descriptor = self._mapped = None

    def _open(self) -> _Descriptor:
        if (descriptor := self._descriptor) is None:
            raise ValueError(f"{self.path}: is read after it was closed")
        return descriptor

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill a contiguous array with the bytes from `offset` on.

        Raises ModelError if the file has changed since it was opened: its size, or the time of its last change.
        """
        descriptor = self._open()
        at, view = 0, memoryview(out.data)
        while at < len(view):
            try:
                count = os.preadv(descriptor.number, [view[at:]], offset + at)
            except OSError as error:
                raise ModelError(f"{self.path}: {error.strerror}") from error
            if not count:
                break
            at += count
        # Behind the read: bytes that were there before a change are as good as ever.
        self._check_unchanged(descriptor, complete=at == len(view))

    def _check_unchanged(self, descriptor: _Descriptor, *, complete: bool = True) -> None:
        facts = os.fstat(descriptor.number)
        if not complete or (facts.st_size, facts.st_mtime_ns) != (self.size, self._changed):
            raise ModelError(f"{self.path}: was changed while it was read; replace a model file by renaming a new one")

    def hold(self, offset: int, size: int) -> NDArray[np.uint8]:
        """As `read`, for bytes that stay in use: without a copy where the file can be mapped (mapped_file.py), and read
        only then. Later changes of the file leave the array as it is."""
        descriptor = self._open()
        with self._lock:
            if self._maps and self._mapped is None:
                self._mapped = map_file(self.path, descriptor.number, self.size)
                self._maps = self._mapped is not None
            mapped = self._mapped
        try:
            # Compiled code reads words of four bytes.
            held = mapped.array(offset, size) if mapped is not None and size and offset % 4 == 0 else None
        except OSError as error:
            raise ModelError(f"{self.path}: {error.strerror}") from error
        if held is None:
            return self.read(offset, size)
        # The lease has held off writers since the mapping was made, not since the file was opened.
        self._check_unchanged(descriptor)
        return held

    def check_path(self) -> None:
        """Raises ModelError if the path names another file by now, or this one has changed."""
        self.read(0, 1)
        descriptor = self._open()
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(descriptor.number)):
                return
        except OSError as error:
            raise ModelError(f"{self.path}: {error.strerror}") from error
        raise ModelError(f"{self.path}: is another file than the one that is loaded")

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """`size` bytes from `offset` on. Raises ModelError as read_into."""
        out = np.empty(size, np.uint8)
        self.read_into(offset, out)
        return out


class FileRows:
    """Rows of bytes in a file, uint8 [rows, row_bytes], which are read when they are used: `np.asarray` reads all,
    a slice its rows."""

    dtype = np.dtype(np.uint8)

    def __init__(self, file: ModelFile, offset: int, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._file = file
        self._offset = offset

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.shape[1]

    def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
        start, stop, _ = rows.indices(self.shape[0])
        count, width = max(0, stop - start), self.shape[1]
        return self._file.read(self._offset + start * width, count * width).reshape(count, width)

    def held(self) -> NDArray[np.uint8]:
        """All rows, as ModelFile.hold."""
        return self._file.hold(self._offset, self.nbytes).reshape(self.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:]

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill a contiguous array with the bytes from `offset` of these on. Raises ModelError as ModelFile."""
        self._file.read_into(self._offset + offset, out)
