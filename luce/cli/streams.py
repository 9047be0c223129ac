"""The standard streams of the process, which may be closed, full or without a reader.

A failed write on standard output ends the verb, whatever catches OSError on the way: with exit status 1 after one line,
or with 141 in silence if the reader has gone, as after SIGPIPE. Standard error is where failures are told: its own are
not.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output cannot be written. Not a LuceError: a conversation goes on after those."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        #: whether the reader of a pipe has gone, which is no failure of this program
        self.silent = isinstance(error, BrokenPipeError)
        self.exit_code = 141 if self.silent else 1


class _File(io.FileIO):
    """A descriptor that takes no more bytes after the first failure, which it keeps."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.failed: OSError | None = None

    def write(self, data: Any) -> int | None:
        """Write, or drop the data after a failure. Raises OutputError on standard output."""
        if self.failed is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failed = error
                if self.fileno() == 1:
                    raise OutputError(error) from None
        return memoryview(data).nbytes


def _stream(descriptor: int, like: TextIO | None) -> tuple[_File, TextIO]:
    """A text stream to a descriptor, with the encoding and the buffering that Python has chosen for it."""
    file = _File(descriptor)
    text = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(like, "encoding", "utf-8"),
        errors=getattr(like, "errors", "backslashreplace"),
        # With PYTHONUNBUFFERED, Python's own streams write through instead.
        line_buffering=descriptor == 2
        or getattr(like, "line_buffering", False)
        or getattr(like, "write_through", False),
    )
    return file, text


def _fill(descriptor: int) -> None:
    """Open the null device as a descriptor that is closed: a file that is opened later must not get its number."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


@contextlib.contextmanager
def checked(*, needed: bool) -> Iterator[Callable[[], None]]:
    """Guard the standard streams for the block. Yields a function that writes what is buffered on standard output, and
    raises OutputError if that or an earlier write has failed. A closed one has failed from the start if it is `needed`.

    Streams that the caller has put in the place of the process's own stay as they are.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    for descriptor, stream in enumerate(before):
        if stream is None:
            _fill(descriptor)
    output: _File | None = None
    if before[0] is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if before[1] is sys.__stdout__:
        output, sys.stdout = _stream(1, before[1])
        if before[1] is None and needed:
            output.failed = OSError(errno.EBADF, os.strerror(errno.EBADF))
    if before[2] is sys.__stderr__:
        _, sys.stderr = _stream(2, before[2])

    def check() -> None:
        sys.stdout.flush()
        # A library may have caught the failure.
        if output is not None and output.failed is not None:
            raise OutputError(output.failed)

    try:
        yield check
    finally:
        with contextlib.suppress(OutputError):
            sys.stdout.flush()
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before
