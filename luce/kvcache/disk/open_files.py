"""Files that are read again and again, with few descriptors: a long conversation has thousands of parts."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import ClassVar

#: descriptors that stay open while nobody reads. More are open only while as many threads read
MOST_IDLE = 64


class ReopenedFile:
    """A file that `opener` opens. Thread-safe.

    It is closed when many others have been read since, and opened again when it is read next. Raises OSError, also if
    its name is another file's by then.
    """

    _lock = threading.Lock()
    #: of all files of the process, those whose descriptor nobody uses; the one used last comes last
    _idle: ClassVar[OrderedDict[ReopenedFile, int]] = OrderedDict()

    def __init__(self, opener: Callable[[], int]) -> None:
        self._opener = opener
        self._closed = False
        fd = opener()
        status = os.fstat(fd)
        #: bytes
        self.size = status.st_size
        self._identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
        self._give_back(fd)

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """A descriptor that stays open until the caller is done. Raises OSError, and ValueError after `close`."""
        with self._lock:
            if self._closed:
                raise ValueError("the file is closed")
            fd = self._idle.pop(self, None)
        if fd is None:
            fd = self._reopened()
        try:
            yield fd
        finally:
            self._give_back(fd)

    def close(self) -> None:
        """Idempotent. Reads in progress finish first."""
        with self._lock:
            self._closed = True
            fd = self._idle.pop(self, None)
        if fd is not None:
            os.close(fd)

    def _reopened(self) -> int:
        fd = self._opener()
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size) != self._identity:
            os.close(fd)
            raise OSError(errno.ESTALE, "the file was replaced while it was read")
        return fd

    def _give_back(self, fd: int) -> None:
        surplus = [fd]
        with self._lock:
            if not self._closed and self not in self._idle:
                self._idle[self] = surplus.pop()
            if len(self._idle) > MOST_IDLE:
                surplus.append(self._idle.popitem(last=False)[1])
        for unused in surplus:
            os.close(unused)
