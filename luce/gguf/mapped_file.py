"""A file in memory without a copy: mapped under a lease, so that nobody changes the bytes under those who read them.

A mapping alone shows whatever is written to its file, and ends the process (SIGBUS) where the file shrinks. Under a
read lease (fcntl(2), F_SETLEASE) Linux holds up whoever opens the file for writing or truncates it, for up to
/proc/sys/fs/lease-break-time (45 s), and signals the holder. A thread then reads the parts in use into memory, puts
that memory in the mapping's place, and gives the lease back. So readers always see the bytes of the time of opening.

Linux gives no lease of a file that is open for writing, or that belongs to another user. File systems whose files can
change elsewhere, such as NFS and FUSE, are left out.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
import struct
import threading
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

# Of statfs(2): ext4, XFS, Btrfs, F2FS, bcachefs, tmpfs, overlayfs, ZFS.
_LOCAL = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0xCA451A4E, 0x01021994, 0x794C7630, 0x2FC12FC1}
# Of fcntl(2), madvise(2) and mremap(2); Python has no names for them.
_F_SETOWN_EX, _F_OWNER_TID = 15, 0
_MADV_POPULATE_READ = 22
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_PAGE = mmap.PAGESIZE
# Bytes that are copied at a time once a writer waits.
_PIECE = 1 << 26


class MappedFile(mmap.mmap):
    """The bytes of a file under a lease, read only; `map_file` makes it. Arrays over it keep it and its lease."""

    def __new__(cls, path: Path, number: int, size: int) -> MappedFile:
        """`number`: a descriptor of the file, whose lease is taken; the mapping keeps one of its own."""
        self = super().__new__(cls, number, size, access=mmap.ACCESS_READ)
        self.path = path
        # The lease belongs to all descriptors that come from one `open`.
        self._number = os.dup(number)
        self._lock = threading.Lock()
        self._used = []
        return self

    # Attributes that __new__ sets: the bytes in use, from where to where, or None once the lease is given back.
    path: Path
    _number: int
    _lock: threading.Lock
    _used: list[tuple[int, int]] | None

    def __del__(self) -> None:
        os.close(self._number)

    def array(self, offset: int, size: int) -> NDArray[np.uint8] | None:
        """`size` > 0 bytes from `offset` on, in memory by now; None once a writer has come. Raises OSError."""
        with self._lock:
            if self._used is None:
                return None
            own = np.frombuffer(self, np.uint8, size, offset)
            skip = own.ctypes.data % _PAGE
            # An error of the disk raises here. Without this, and on Linux before 5.14, it would be a SIGBUS.
            if _libc().madvise(own.ctypes.data - skip, size + skip, _MADV_POPULATE_READ):
                problem = ctypes.get_errno()
                if problem != errno.EINVAL:
                    raise OSError(problem, os.strerror(problem))
            self._used.append((offset - skip, offset + size))
            return own

    def let_writer_go_on(self) -> None:
        """If a writer waits, put a copy of the bytes in use in the mapping's place, and give the lease back."""
        with self._lock:
            if self._used is None or fcntl.fcntl(self._number, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
                return
            base, at, copied = np.frombuffer(self, np.uint8).ctypes.data, 0, 0
            for begin, end in sorted(self._used):
                at = max(at, begin)
                while at < end:
                    size = min(_PIECE, -(-(end - at) // _PAGE) * _PAGE)
                    _put_copy(self._number, at, size, base + at)
                    at, copied = at + size, copied + size
            self._used = None
            _log.warning("%s: another program opens it for writing; copied %d bytes to memory", self.path, copied)
            fcntl.fcntl(self._number, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def map_file(path: Path, number: int, size: int) -> MappedFile | None:
    """The file of a descriptor, which was opened read only; None if the system gives no lease of it."""
    if not _is_local(number):
        return None
    watcher = _watcher()
    try:
        fcntl.fcntl(number, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, watcher.thread))
        fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        _log.info("%s: is read into memory, not mapped: no lease (%s)", path, error.strerror)
        return None
    mapped = MappedFile(path, number, size)
    with watcher.lock:
        watcher.files.add(mapped)
    # A writer that came before this file was listed has sent its signal.
    mapped.let_writer_go_on()
    return mapped


class _Watcher:
    """The thread that leases signal."""

    def __init__(self) -> None:
        self.files: WeakSet[MappedFile] = WeakSet()
        self.lock = threading.Lock()
        self.thread = 0
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), name="luce-leases", daemon=True).start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        # SIGIO ends a process that neither blocks nor handles it. It comes to this thread only.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        self.thread = threading.get_native_id()
        started.set()
        while True:
            signal.sigwaitinfo({signal.SIGIO})
            with self.lock:
                files = list(self.files)
            for file in files:
                try:
                    file.let_writer_go_on()
                except OSError as error:
                    # Behind the lease's time, reading the mapping would end the process, or show other bytes.
                    _log.critical("%s: is written to and cannot be copied (%s); stopping", file.path, error.strerror)
                    os.kill(os.getpid(), signal.SIGTERM)


@cache
def _watcher() -> _Watcher:
    return _Watcher()


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.madvise.argtypes = address, size, flags
    library.mmap.argtypes, library.mmap.restype = (address, size, flags, flags, flags, ctypes.c_long), address
    library.mremap.argtypes, library.mremap.restype = (address, size, size, flags, address), address
    return library


def _is_local(number: int) -> bool:
    facts = ctypes.create_string_buffer(256)
    kind = ctypes.c_long.from_buffer(facts)
    return _libc().fstatfs(number, facts) == 0 and kind.value & 0xFFFFFFFF in _LOCAL


def _put_copy(number: int, offset: int, size: int, address: int) -> None:
    """Put `size` bytes of a file, or what there are up to its end, at an address. Threads that read there wait for it.
    Raises OSError."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = _libc().mmap(None, size, protection, flags, -1, 0)
    if memory == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    view, at = memoryview((ctypes.c_ubyte * size).from_address(memory)).cast("B"), 0
    while count := os.preadv(number, [view[at:]], offset + at):
        at += count
    # Moves whole pages: no thread finds the place empty.
    if _libc().mremap(memory, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
